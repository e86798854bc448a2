"""Embeddings from a run's own policy: the mean of its last hidden states over a text's tokens."""

import asyncio
from collections.abc import Sequence

import numpy as np
import torch
from safetensors.torch import load

from penstock.actors.policy.model import Policy
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer
from penstock.actors.trainer.checkpoint import newest_checkpoint
from penstock.infra.run.config_file import load_config
from penstock.infra.run.runs import RunDir
from penstock.messages.errors import NotFoundError

TOKENS_MAX = 192
BATCH_TOKENS_MAX = 4_096
_WEIGHTS = "weights."


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
    state = load(await store.get(key))
    weights = {k.removeprefix(_WEIGHTS): v for k, v in state.items() if k.startswith(_WEIGHTS)}
    policy.load_state_dict(weights)
    text = (await store.get(TOKENIZER_KEY)).decode()
    return PolicyEmbedder(policy, Tokenizer.from_json(text, TOKENIZER_KEY))
