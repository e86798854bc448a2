"""One turn from a generator: chunks of tokens to a whole, or nothing at all.

A turn that broke off (its generator died, paused, or fell silent) leaves no tokens behind: it is
sampled again with the same seed, and only what is stored as `TurnSampled` was ever generated, as
far as the ledger is concerned.
"""

import random
from contextlib import aclosing

import msgspec

from penstock.actors.policy.sampling import BrokenTurnError, SampledTokens, stream_chunks
from penstock.actors.runtime.context import Context
from penstock.messages.errors import BusError, DeadlineError, PenstockError, RemoteCallError
from penstock.messages.generation import Generate
from penstock.messages.rollout import StopReason
from penstock.messages.rpc import RemoteErrorKind, RetryPolicy, with_retries
from penstock.messages.task import Sampling


class GenerationError(PenstockError, RuntimeError):
    """No generator gave this turn within the time there was."""


def turn_sampling(sampling: Sampling, index: int, num_tokens_max: int, end_id: int) -> Sampling:
    """Return how turn `index` is drawn; its seed follows from the rollout's and the index."""
    seed = random.Random(f"turn.{sampling.seed}.{index}").getrandbits(31)
    return msgspec.structs.replace(
        sampling, seed=seed, num_tokens_max=num_tokens_max, stop_token_ids=(end_id,)
    )


async def sample_turn(
    ctx: Context, request: Generate, retry: RetryPolicy, *, idle_s: float
) -> tuple[SampledTokens, float]:
    """Ask until a generator gives the whole turn; one that is silent for `idle_s` has failed.

    Returns:
        The turn, and the seconds lost in attempts that failed.

    Raises:
        GenerationError: The policy gave up, or the request itself is invalid.

    """
    started_at = ctx.monotonic()

    async def attempt() -> tuple[SampledTokens, float]:
        lost_s = ctx.monotonic() - started_at
        return await _sample_once(ctx, request, idle_s), lost_s

    try:
        return await with_retries(
            attempt,
            retry,
            retry_on=(DeadlineError, RemoteCallError, BusError),
            is_final=lambda error: getattr(error, "kind", "") == RemoteErrorKind.INVALID,
        )
    except (DeadlineError, RemoteCallError, BusError) as error:
        raise GenerationError(f"{request.request_id}: {error}") from error


async def _sample_once(ctx: Context, request: Generate, idle_s: float) -> SampledTokens:
    sampled = SampledTokens()
    chunks = stream_chunks(ctx, request, idle_s=idle_s, reason=request.request_id)
    async with aclosing(chunks):
        async for chunk in chunks:
            sampled.add(chunk)
    if sampled.stop_reason in {None, StopReason.ABORTED} or not sampled.token_ids:
        raise BrokenTurnError(f"the turn broke off after {len(sampled.token_ids)} tokens")
    return sampled
