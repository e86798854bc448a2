"""How often a failed operation is retried, and for how long."""

import asyncio
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar

import msgspec

R = TypeVar("R")


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How often, and for how long, a failed operation is retried."""

    pause_s: float
    """Pause before the second attempt."""
    pause_s_max: float = 0.0
    """Bound of the pause, which doubles up to it; 0 keeps it constant."""
    deadline_s: float = math.inf
    """Seconds after the first attempt at which no further one starts; by default the caller bounds
    it."""
    num_attempts_max: int = sys.maxsize

    def pauses(self) -> Generator[float]:
        """Yield the pause after each failed attempt that is not the last."""
        pause_s = self.pause_s
        for _ in range(self.num_attempts_max - 1):
            yield pause_s
            pause_s = max(self.pause_s, min(2 * pause_s, self.pause_s_max))


def _never(error: Exception) -> bool:
    return False


async def with_retries(  # noqa: PLR0913 - all but two have defaults
    operation: Callable[[], Awaitable[R]],
    policy: RetryPolicy,
    *,
    retry_on: tuple[type[Exception], ...],
    is_final: Callable[[Exception], bool] = _never,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    log: logging.Logger | None = None,
) -> R:
    """Await `operation()` until it succeeds; raise its last error when the policy gives up.

    Errors other than `retry_on`, those that are `is_final`, and cancellation are raised at once.
    Time is the event loop's, so a simulation's clock applies.
    """
    loop = asyncio.get_running_loop()
    give_up_at, pauses = loop.time() + policy.deadline_s, policy.pauses()
    while True:
        try:
            return await operation()
        except retry_on as error:
            pause_s = next(pauses, math.inf)
            if math.isinf(pause_s) or loop.time() + pause_s > give_up_at or is_final(error):
                raise
            if log is not None:
                log.warning("trying again: %s", error)
        await sleep(pause_s)
