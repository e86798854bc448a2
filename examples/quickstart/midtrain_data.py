"""Text and demonstrations for mid-training: what the tokenizer and the policy learn from first."""

import asyncio
import random
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from penstock import (
    ChatMessage,
    ConfigError,
    Corpora,
    CorpusBuilder,
    CorpusRequest,
    OfferedTools,
    PenstockChat,
    Role,
    Split,
    Tokenizer,
    tools_prompt,
    train_tokenizer,
)
from penstock.actors.policy.special_tokens import ALL_SPECIAL_TOKENS

from .ladder.generate import LadderTasks, draw_repositories
from .ladder.repository import Repository
from .ladder.transcripts import Habits, Transcript, demonstrate
from .settings import CorpusSettings, LadderCorpora

_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)
_FILE_BYTES_MAX = 200_000
_HELDOUT_EVERY = 20
_NUM_CODE_FILES = 4
"""Files of the standard library that it learns from: with more of them, names that demonstrations
are made of would be broken into pieces, each of which has to be copied right."""


def ladder_corpora(request: CorpusRequest) -> Corpora:
    """Return the tokenizer and both corpora of a run on the ladder; for `[prepare.corpora]`.

    Raises:
        ConfigError: Wrong settings, a file of `model.corpora` that is not there or broken, or
            nothing to read.
        PreparationStoppedError: Nobody waits for them any more.

    """
    config = request.settings(LadderCorpora)
    selection = config.selection or request.source_settings(config.source, LadderTasks)
    rng = random.Random(f"midtrain/{request.seed}")
    code, heldout_code = standard_library(rng)
    if config.code_tokens == 0:
        code, heldout_code = [], []
    tasks = draw_repositories(Split.TRAIN, config.num_demonstrations, selection, rng, "demo")
    transcripts = attempts(request.until_stopped(tasks), config.habits, rng, request.harness)
    words = [*(transcript_text(one) for one in transcripts[:2000]), *code[:_NUM_CODE_FILES]]
    tokenizer = train_tokenizer([*words, *request.texts()], request.vocab_size)
    train, heldout, chat = CorpusBuilder(), CorpusBuilder(), PenstockChat(tokenizer)
    num_code = 0
    for text in request.until_stopped(code):
        ids = tokenizer.encode(text)
        num_code += train.add_pieces(ids, config.code_weight, config.piece_tokens)
        if num_code >= config.code_tokens:
            break
    add_drills(train, tokenizer, request.seed, config)
    for transcript in request.until_stopped(transcripts):
        is_whole = rng.random() < config.endings
        read = transcript if is_whole else transcript.until_edited()
        add_transcript(train, chat, read, config.context_weight)
    for text in request.until_stopped(heldout_code):
        heldout.add_pieces(tokenizer.encode(text), 1.0, config.piece_tokens)
    if (train.is_empty or heldout.is_empty) and not request.corpora:
        fields = f"{request.field}.num_demonstrations, {request.field}.code_tokens"
        text = "expected demonstrations and standard-library code, or model.corpora in their place"
        raise ConfigError(f"{fields}: {text}")
    return Corpora(tokenizer, train, heldout)


def standard_library(rng: random.Random) -> tuple[list[str], list[str]]:
    """Read the standard library's own modules, shuffled.

    Returns:
        Texts to train on, and the held-out twentieth of the files, which is always the same.

    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if _is_product_code(path.relative_to(root)))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    heldout = texts[::_HELDOUT_EVERY]
    train = [text for index, text in enumerate(texts) if index % _HELDOUT_EVERY]
    rng.shuffle(train)
    return train, heldout


def attempts(
    repositories: Iterable[Repository], habits: Habits, rng: random.Random, harness: str
) -> list[Transcript]:
    """Let the demonstrating actor attempt each task once, with one version of the tools."""

    async def all_attempts() -> list[Transcript]:
        return [await demonstrate(each, habits, rng, harness) for each in repositories]

    return asyncio.run(all_attempts())


def transcript_text(transcript: Transcript) -> str:
    """Return the plain words of a transcript, for the tokenizer to learn from."""
    tools = tools_prompt(transcript.harness)
    parts = [tools, transcript.instruction] if tools else [transcript.instruction]
    for turn in transcript.turns:
        parts += [value for call in turn.calls for value in call.arguments.values()]
        parts += [result.text for result in turn.results]
    return "\n".join(parts)


def add_transcript(
    builder: CorpusBuilder, chat: PenstockChat, transcript: Transcript, context_weight: float
) -> int:
    """Add an episode: the actor's own tokens have weight 1, what it reads less, slips none."""
    tools = OfferedTools(words=tools_prompt(transcript.harness))
    ids = chat.render_prompt([ChatMessage(role=Role.USER, content=transcript.instruction)], tools)
    weights = [context_weight] * len(ids)
    for turn in transcript.turns:
        sampled = chat.render_turn("", turn.calls)
        ids += sampled
        weights += [0.0 if turn.is_slip else 1.0] * len(sampled)
        if turn is not transcript.turns[-1]:  # Nothing follows what it returned.
            seen = chat.render_observation((), (), [("", result.text) for result in turn.results])
            ids += seen
            weights += [context_weight] * len(seen)
    builder.add(ids, weights)
    return len(ids)


def add_drills(
    builder: CorpusBuilder, tokenizer: Tokenizer, seed: int, config: CorpusSettings
) -> None:
    """Add rows of random plain tokens, each row repeated; only the second time counts.

    Looking up what followed earlier (induction heads, arXiv 2209.11895) is learned from these
    in a tenth of the tokens that transcripts alone need, and edits are made of it.
    """
    half_tokens = config.drill_half_tokens
    rng = np.random.default_rng([seed, config.drill_tokens])
    first = max(tokenizer.special_id(name) for name in ALL_SPECIAL_TOKENS) + 1
    weights = [0.0] * (half_tokens + 1) + [1.0] * (half_tokens - 1)
    for _ in range(config.drill_tokens // (2 * half_tokens)):
        row = rng.integers(first, tokenizer.vocab_size, half_tokens).tolist()
        builder.add(row + row, weights)


def _is_product_code(path: Path) -> bool:
    return not _SKIPPED_FOLDERS & set(path.parts)
