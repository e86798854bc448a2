"""Code search measured: docstring in, function out, over functions that no policy was trained on.

Corpus: functions of installed packages, their docstrings taken out. Query: the first line of a
docstring. Each ranking alone and fused; also how long a query takes. The embeddings are of a run's
own policy: the mean of its last hidden states over a text's tokens.
"""

import argparse
import ast
import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.actors.policy.model import Policy
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer
from penstock.actors.trainer.checkpoint import newest_checkpoint, read_policy_weights
from penstock.envs.factory.modules import package_modules
from penstock.envs.factory.targets import find_targets
from penstock.envs.harness.retrieval.ranking import WordIndex, cosine_scores, fused_scores
from penstock.envs.python_source import PythonSourceError, parse_python
from penstock.envs.tasks.source import TaskRejectedError
from penstock.infra.config.file import load_config
from penstock.infra.run.runs import RunDir, find_run
from penstock.messages.errors import NotFoundError

PACKAGES = ("networkx", "rich", "markdown_it", "packaging", "mpmath", "fsspec", "click", "anyio")
"""Not of the standard library, of which the quickstart's policy reads in mid-training."""
FUNCTIONS_MAX = 1_500
QUERY_WORDS_MIN = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `search`."""
    parser.add_argument("--run", type=Path, help="the run whose policy computes embeddings")


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the rankings on functions of installed packages."""
    return await bench_search(arguments.run, arguments.runs_dir)


async def bench_search(name: Path | None, runs_dir: Path) -> dict[str, Any]:
    """Measure words, and the policy's hidden states and both where a run is given or there.

    Returns:
        For each ranking (`bm25`, `hidden_states`, `fused`) MRR and recall at 1, 5 and 10; the run
        whose policy embedded; the median milliseconds of a query by words.

    """
    queries, texts = docstring_pairs()
    index = WordIndex(texts)
    by_words = np.stack([index.scores(query) for query in queries])
    rankings: dict[str, np.ndarray] = {"bm25": by_words}
    policy = ""
    try:
        found = find_run(str(name) if name else "latest", runs_dir)
        embedder = await open_policy_embedder(found)
    except NotFoundError as missing:
        policy = f"none: {missing}"
    else:
        policy = found.run_id
        rows, asked = await embedder.embed(texts), await embedder.embed(queries)
        rankings["hidden_states"] = np.stack([cosine_scores(one, rows) for one in asked])
        pairs = zip(by_words, rankings["hidden_states"], strict=True)
        rankings["fused"] = np.stack([fused_scores(pair) for pair in pairs])
    return {
        "num_functions": len(texts),
        "num_queries": len(queries),
        "policy": policy,
        "bm25_query_ms_p50": _median_ms(lambda number: index.scores(queries[number])),
        **{name: retrieval_figures(scores) for name, scores in rankings.items()},
    }


def docstring_pairs() -> tuple[list[str], list[str]]:
    """Return queries and texts, the n-th query asking for the n-th text; each text once."""
    pairs: dict[str, str] = {}
    for name in PACKAGES:
        for query, text in _package_pairs(name):
            pairs.setdefault(text, query)
    chosen = sorted(pairs.items())[:: max(1, len(pairs) // FUNCTIONS_MAX)][:FUNCTIONS_MAX]
    return [query for _, query in chosen], [text for text, _ in chosen]


def _package_pairs(name: str) -> list[tuple[str, str]]:
    try:
        modules = package_modules(name)
    except NotFoundError:
        return []
    pairs: list[tuple[str, str]] = []
    for module in modules:
        try:
            tree = parse_python(module.read())
        except (TaskRejectedError, PythonSourceError):
            continue
        for target in find_targets(tree):
            query = target.docstring.strip().split("\n")[0]
            if len(query.split()) >= QUERY_WORDS_MIN:
                target.node.body = target.node.body[1:] or target.node.body
                pairs.append((query, f"{module.file}\n{ast.unparse(target.node)}"))
    return pairs


def retrieval_figures(scores: np.ndarray) -> dict[str, float]:
    """Return MRR and recalls of scores [Q, N] where the n-th query asks for the n-th text.

    Ties count against the right text: a constant ranking scores nothing.
    """
    right = np.diagonal(scores)[:, None]
    ranks = (scores >= right).sum(axis=1)
    figures = {"mrr": float((1.0 / ranks).mean())}
    figures |= {f"recall_at_{k}": float((ranks <= k).mean()) for k in (1, 5, 10)}
    return {name: round(value, 4) for name, value in figures.items()}


def _median_ms(work: Callable[[int], object], repeats: int = 50) -> float:
    times: list[float] = []
    for number in range(repeats):
        started = time.perf_counter()
        work(number)
        times.append((time.perf_counter() - started) * 1000)
    return round(sorted(times)[repeats // 2], 3)


TOKENS_MAX = 192
BATCH_TOKENS_MAX = 4_096


class PolicyEmbedder:
    """Implements `Embedder` with a policy in this process.

    Args:
        policy: Any version of it.
        tokenizer: Its own.

    """

    def __init__(self, policy: Policy, tokenizer: Tokenizer) -> None:
        self._policy, self._tokenizer = policy.eval(), tokenizer

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 [N, hidden_size]."""
        return await asyncio.to_thread(self._embed, texts)

    @torch.no_grad()
    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        rows = [self._tokenizer.encode(text)[:TOKENS_MAX] or [0] for text in texts]
        vectors: list[torch.Tensor] = []
        batch: list[list[int]] = []
        for row in rows:
            if batch and sum(map(len, batch)) + len(row) > BATCH_TOKENS_MAX:
                vectors += self._means(batch)
                batch = []
            batch.append(row)
        vectors += self._means(batch)
        return torch.stack(vectors).float().numpy()

    def _means(self, rows: list[list[int]]) -> list[torch.Tensor]:
        lengths = [len(row) for row in rows]
        ids = torch.tensor([token for row in rows for token in row])
        hidden = self._policy(ids, lengths).hidden
        return [piece.mean(dim=0) for piece in hidden.split(lengths)]


async def open_policy_embedder(run: RunDir) -> PolicyEmbedder:
    """Load the newest checkpoint of a run.

    Raises:
        NotFoundError: The run has none yet.

    """
    store = run.store()
    key = await newest_checkpoint(store)
    if key is None:
        raise NotFoundError(f"run {run.run_id}: expected a checkpoint, there is none yet")
    policy = Policy(load_config(run.config).policy)
    policy.load_state_dict(await read_policy_weights(store, key))
    text = (await store.get(TOKENIZER_KEY)).decode()
    return PolicyEmbedder(policy, Tokenizer.from_json(text, TOKENIZER_KEY))
