"""One turn from a generator: chunks of tokens to a whole, or nothing at all.

A turn that broke off (its generator died, paused, or fell silent) leaves no tokens behind: it is
sampled again with the same seed, and only what is stored as `TurnSampled` was ever generated, as
far as the ledger is concerned.
"""

import random

import msgspec
import numpy as np

from penstock.actors.runtime.context import Context
from penstock.messages.base import Array
from penstock.messages.errors import BusError, DeadlineError, PenstockError, RemoteCallError
from penstock.messages.generation import Generate, TokensSampled
from penstock.messages.rollout import StopReason, VersionSpan
from penstock.messages.rpc import RemoteErrorKind
from penstock.messages.task import Sampling


class GenerationError(PenstockError, RuntimeError):
    """No generator gave this turn within the time there was."""


class BrokenTurnError(BusError):
    """The replies ended before the turn did."""


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How long to insist."""

    idle_s: float
    wait_s: float
    delay_s: float
    delay_s_max: float


class SampledTokens(msgspec.Struct, frozen=True, kw_only=True):
    """A whole turn as sampled; N >= 1 tokens."""

    token_ids: np.ndarray
    """int32 [N]."""
    behavior_logprobs: Array
    """float32 [N]."""
    route_segments: list[bytes]
    arithmetic: str
    version_spans: list[VersionSpan]
    stop_reason: StopReason


def turn_sampling(sampling: Sampling, index: int, num_tokens_max: int, end_id: int) -> Sampling:
    """Return how turn `index` is drawn; its seed follows from the rollout's and the index."""
    seed = random.Random(f"turn.{sampling.seed}.{index}").getrandbits(31)
    return msgspec.structs.replace(
        sampling, seed=seed, num_tokens_max=num_tokens_max, stop_token_ids=(end_id,)
    )


async def sample_turn(
    ctx: Context, request: Generate, retry: RetryPolicy
) -> tuple[SampledTokens, float]:
    """Ask until a generator gives the whole turn.

    Returns:
        The turn, and the seconds lost in attempts that failed.

    Raises:
        GenerationError: None did within `retry.wait_s`, or the request itself is invalid.

    """
    started_at = ctx.monotonic()
    delay_s = retry.delay_s
    while True:
        lost_s = ctx.monotonic() - started_at
        try:
            return await _sample_once(ctx, request, retry.idle_s), lost_s
        except (DeadlineError, RemoteCallError, BusError) as error:
            is_hopeless = getattr(error, "kind", "") == RemoteErrorKind.INVALID
            if is_hopeless or ctx.monotonic() - started_at + delay_s > retry.wait_s:
                raise GenerationError(f"{request.request_id}: {error}") from error
        await ctx.sleep(delay_s)
        delay_s = min(2 * delay_s, retry.delay_s_max)


async def _sample_once(ctx: Context, request: Generate, idle_s: float) -> SampledTokens:
    chunks: list[TokensSampled] = []
    replies = ctx.stream_request(
        f"generate.{request.purpose}", request, idle_s=idle_s, reason=request.request_id
    )
    async for reply in replies:
        if not isinstance(reply, TokensSampled):
            raise BrokenTurnError(f"expected TokensSampled, got {type(reply).__name__}")
        chunks.append(reply)
    return join_chunks(chunks)


def join_chunks(chunks: list[TokensSampled]) -> SampledTokens:
    """Join the replies to one request.

    Raises:
        BrokenTurnError: The last one is missing, or says that sampling was aborted.

    """
    last = chunks[-1] if chunks else None
    if last is None or last.stop_reason is None or last.stop_reason is StopReason.ABORTED:
        raise BrokenTurnError(f"the turn broke off after {len(chunks)} replies")
    token_ids = np.frombuffer(b"".join(chunk.token_ids.data for chunk in chunks), dtype="<i4")
    logprobs = b"".join(chunk.behavior_logprobs.data for chunk in chunks)
    if not len(token_ids) or len(logprobs) != 4 * len(token_ids):
        raise BrokenTurnError(f"{len(token_ids)} tokens with {len(logprobs) // 4} logprobs")
    return SampledTokens(
        token_ids=token_ids,
        behavior_logprobs=Array(dtype="float32", shape=(len(token_ids),), data=logprobs),
        route_segments=last.route_segments,
        arithmetic=last.arithmetic,
        version_spans=_merge_spans(chunks),
        stop_reason=last.stop_reason,
    )


def _merge_spans(chunks: list[TokensSampled]) -> list[VersionSpan]:
    spans: list[VersionSpan] = []
    for chunk in chunks:
        version, num_tokens = chunk.policy_version, chunk.token_ids.shape[0]
        if spans and spans[-1].policy_version == version:
            num_tokens += spans.pop().num_tokens
        if num_tokens:
            spans.append(VersionSpan(policy_version=version, num_tokens=num_tokens))
    return spans
