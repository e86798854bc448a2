"""One turn from a generator: chunks of tokens to a whole, or nothing at all.

A turn that broke off (its generator died, paused, or fell silent) leaves no tokens behind: it is
sampled again with the same seed, and only what is stored as `TurnSampled` was ever generated, as
far as the ledger is concerned.
"""

import random

import msgspec

from penstock.actors.policy.sampling import BrokenTurnError, SampledTokens, stream_chunks
from penstock.actors.runtime.context import Context
from penstock.actors.runtime.iteration import closing
from penstock.messages.errors import BusError, DeadlineError, PenstockError, RemoteCallError
from penstock.messages.generation import Generate
from penstock.messages.rollout import StopReason
from penstock.messages.rpc import RemoteErrorKind
from penstock.messages.task import Sampling


class GenerationError(PenstockError, RuntimeError):
    """No generator gave this turn within the time there was."""


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How long to insist."""

    idle_s: float
    wait_s: float
    delay_s: float
    delay_s_max: float


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
    sampled = SampledTokens()
    chunks = stream_chunks(ctx, request, idle_s=idle_s, reason=request.request_id)
    async with closing(chunks):
        async for chunk in chunks:
            sampled.add(chunk)
    if sampled.stop_reason in {None, StopReason.ABORTED} or not sampled.token_ids:
        raise BrokenTurnError(f"the turn broke off after {len(sampled.token_ids)} tokens")
    return sampled
