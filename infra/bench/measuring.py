"""Times, for benchmarks."""

import time
from collections.abc import Awaitable, Callable


async def times_ms(work: Callable[[], Awaitable[object]], repeats: int) -> list[float]:
    """Return how long each of several runs took, one after the other, in milliseconds."""
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        await work()
        times.append((time.perf_counter() - began) * 1000)
    return times
