"""Sequences of a corpus dealt out to steps and their passes."""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from penstock.actors.trainer.config import MidtrainConfig
from penstock.actors.trainer.midtraining.corpus import Corpus, segments


@dataclass(frozen=True)
class PackedBatch:
    """Packed segments: T tokens, M of them targets, Q targets of the second head."""

    token_ids: torch.Tensor
    lengths: list[int]
    rows: torch.Tensor
    """[M] positions that have a next token in their segment."""
    mtp_rows: torch.Tensor
    """[Q] positions that have a token after next."""
    weights: torch.Tensor
    """[T] of each token as a target."""

    def on(self, device: torch.device) -> "PackedBatch":
        """Return it with its tensors on a device."""
        tensors = (self.token_ids, self.rows, self.mtp_rows, self.weights)
        token_ids, rows, mtp_rows, weights = (tensor.to(device) for tensor in tensors)
        return PackedBatch(token_ids, self.lengths, rows, mtp_rows, weights)


@dataclass(frozen=True)
class BatchTotals:
    """What the losses of a batch are divided by, over all its passes."""

    num_tokens: int
    next_weight: float
    mtp_weight: float

    @staticmethod
    def of(passes: list[PackedBatch]) -> "BatchTotals":
        """Add up; a batch without targets divides by almost nothing instead of by zero."""
        return BatchTotals(
            sum(batch.token_ids.numel() for batch in passes),
            max(sum(float(batch.weights[batch.rows + 1].sum()) for batch in passes), 1e-6),
            max(sum(float(batch.weights[batch.mtp_rows + 2].sum()) for batch in passes), 1e-6),
        )


def step_batches(
    corpus: Corpus, config: MidtrainConfig, random: np.random.Generator, num_skipped: int = 0
) -> Iterator[list[PackedBatch]]:
    """Yield the passes of one step after another, for ever; shuffled again in every epoch.

    Args:
        corpus: What is read.
        config: Sizes.
        random: Of the order.
        num_skipped: Steps at the beginning that were taken already.

    """
    pieces = segments(corpus, config.sequence_tokens)
    for step in islice(_step_pieces(pieces, config, random), num_skipped, None):
        yield [packed_batch(corpus, part) for part in even_parts(step, config.pass_tokens)]


def _step_pieces(
    pieces: np.ndarray, config: MidtrainConfig, random: np.random.Generator
) -> Iterator[np.ndarray]:
    while True:
        shuffled = pieces[random.permutation(len(pieces))]
        yield from packed_runs(shuffled, config.batch_tokens)


def packed_runs(pieces: np.ndarray, tokens_max: int) -> Iterator[np.ndarray]:
    """Cut [S, 2] pieces into runs of at most `tokens_max` tokens."""
    start, room = 0, tokens_max
    for index, length in enumerate(pieces[:, 1].tolist()):
        if length > room:
            yield pieces[start:index]
            start, room = index, tokens_max
        room -= length
    yield pieces[start:]


def even_parts(pieces: np.ndarray, tokens_max: int) -> list[np.ndarray]:
    """Deal [S, 2] pieces out to few parts of about the same size, so that none is waited for.

    The longest piece comes first, each to the part that is smallest then; one part more where one
    would hold over `tokens_max` tokens, which no piece does alone.

    Raises:
        ValueError: There is no piece, or one of more than `tokens_max` tokens.

    """
    if not len(pieces):
        raise ValueError("pieces: expected at least one, got none")
    lengths = pieces[:, 1]
    longest_first = np.argsort(-lengths, kind="stable").tolist()
    num_large = int((2 * lengths > tokens_max).sum())  # Of which no two share a part.
    fewest = max(1, math.ceil(lengths.sum() / tokens_max), num_large)
    for num_parts in range(fewest, len(pieces) + 1):
        parts = _dealt(longest_first, lengths, num_parts, tokens_max)
        if parts is not None:
            return [pieces[part] for part in parts]
    raise ValueError(f"pieces: expected at most {tokens_max} tokens in each, got {lengths.max()}")


def _dealt(
    order: list[int], lengths: np.ndarray, num_parts: int, tokens_max: int
) -> list[list[int]] | None:
    """Deal pieces out, each to the smallest part; None where one does not fit there."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    sizes = [(0, part) for part in range(num_parts)]
    for piece in order:
        size, part = sizes[0]
        size += int(lengths[piece])
        if size > tokens_max:
            return None
        parts[part].append(piece)
        heapq.heapreplace(sizes, (size, part))
    return parts


def packed_batch(corpus: Corpus, pieces: np.ndarray) -> PackedBatch:
    """Gather [S, 2] pieces of a corpus into one pass."""
    index = np.concatenate([np.arange(start, start + length) for start, length in pieces.tolist()])
    lengths = pieces[:, 1].tolist()
    to_end = np.concatenate([np.arange(length, 0, -1) for length in lengths])
    weights = np.ones(index.size, np.float32)
    if corpus.weights is not None:
        weights = corpus.weights[index].astype(np.float32)
    return PackedBatch(
        token_ids=torch.from_numpy(corpus.tokens[index].astype(np.int64)),
        lengths=lengths,
        rows=torch.from_numpy(np.flatnonzero(to_end > 1)),
        mtp_rows=torch.from_numpy(np.flatnonzero(to_end > 2)),
        weights=torch.from_numpy(weights),
    )
