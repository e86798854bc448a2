"""Times and their percentiles, for benchmarks."""

import time
from collections.abc import Awaitable, Callable


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile by nearest rank; `values` need not be sorted, but there must be one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


async def times_ms(work: Callable[[], Awaitable[object]], repeats: int) -> list[float]:
    """Return how long each of several runs took, one after the other, in milliseconds."""
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        await work()
        times.append((time.perf_counter() - began) * 1000)
    return times
