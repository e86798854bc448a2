"""vLLM's outputs as chunks of one policy version each."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from penstock.actors.generator.engine import TokenChunk
from penstock.actors.generator.vllm.turns import TurnRecord
from penstock.kernels.support import row_bytes
from penstock.messages.rollout import VersionSpan


class DrawnToken(NamedTuple):
    """One token, as `TurnSampler` sent it."""

    token_id: int
    logprob: float
    policy_version: int
    top_ids: list[int]
    top_logprobs: list[float]

    @property
    def is_fault(self) -> bool:
        """Whether it stands for a token that could not be drawn."""
        return math.isnan(self.logprob)


def drawn_tokens(output: Any, vocab_size: int) -> list[DrawnToken]:
    """Read a `CompletionOutput`."""
    return [
        _drawn(token_id, pairs, vocab_size)
        for token_id, pairs in zip(output.token_ids, output.logprobs or (), strict=True)
    ]


def _drawn(token_id: int, pairs: dict[int, Any], vocab_size: int) -> DrawnToken:
    versions = [other - vocab_size for other in pairs if other >= vocab_size]
    # Pairs are in the order of the columns; the sampled one is the first, its rank 0 unless it is
    # among the likeliest too: those have their column's.
    top = sorted((pair.rank, other) for other, pair in pairs.items() if pair.rank >= 2)
    return DrawnToken(
        token_id=token_id,
        logprob=pairs[token_id].logprob,
        policy_version=versions[0],
        top_ids=[other for _, other in top],
        top_logprobs=[pairs[other].logprob for _, other in top],
    )


def chunks_of(
    tokens: Sequence[DrawnToken], record: TurnRecord | None, vocab_size: int
) -> Iterator[TokenChunk]:
    """Make a chunk of each run of tokens under one version.

    Args:
        tokens: Consecutive ones.
        record: What the worker noted of them; None if nothing.
        vocab_size: Of the policy.

    """
    start = 0
    for version, run in groupby(tokens, lambda token: token.policy_version):
        group = list(run)
        end = start + len(group)
        supports, forced = _shaped(record, start, end, vocab_size)
        has_top = bool(group[0].top_ids)
        yield TokenChunk(
            token_ids=np.array([token.token_id for token in group], np.int32),
            behavior_logprobs=np.array([token.logprob for token in group], np.float32),
            policy_version=version,
            support=supports,
            is_forced=forced,
            top_ids=np.array([t.top_ids for t in group], np.int32) if has_top else None,
            top_logprobs=np.array([t.top_logprobs for t in group], np.float32) if has_top else None,
        )
        start = end


def _shaped(
    record: TurnRecord | None, start: int, end: int, vocab_size: int
) -> tuple[np.ndarray | None, np.ndarray]:
    if record is None or not record.forced:
        return None, np.empty(0, bool)
    forced = np.frombuffer(record.forced, bool)[start:end]
    if not record.supports:
        return None, forced
    supports = np.frombuffer(record.supports, np.uint8).reshape(-1, row_bytes(vocab_size))
    return supports[start:end], forced


def version_spans(versions: np.ndarray) -> tuple[VersionSpan, ...]:
    """Return int32 [R] as runs."""
    return tuple(
        VersionSpan(policy_version=int(version), num_tokens=len(list(run)))
        for version, run in groupby(versions.tolist())
    )
