"""Concurrency by bytes: how many objects of one version are in flight at once."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import repeat
from typing import Any, TypeVar

from penstock.messages.weights import ShardRef

WINDOW_BYTES = 1 << 30
"""Bytes of one version in flight at once: what 100 Gbit/s carry in 86 ms. Objects that have arrived
are held in addition."""
NUM_TRANSFERS_MIN = 8
"""In flight at once however large they are, so that a link is not idle for a round trip between
two objects."""
NUM_TRANSFERS_MAX = 64
R = TypeVar("R")


class _Window:
    """Room for bytes, given in the order of arrival; an object takes 1/64 to 1/8 of it."""

    def __init__(self) -> None:
        self._num_free = WINDOW_BYTES
        self._turn = asyncio.Lock()
        self._left = asyncio.Event()

    @asynccontextmanager
    async def room(self, num_bytes: int) -> AsyncGenerator[None]:
        least, most = WINDOW_BYTES // NUM_TRANSFERS_MAX, WINDOW_BYTES // NUM_TRANSFERS_MIN
        taken = min(max(num_bytes, least), most)
        async with self._turn:
            while self._num_free < taken:
                self._left.clear()
                await self._left.wait()
            self._num_free -= taken
        try:
            yield
        finally:
            self._num_free += taken
            self._left.set()


async def gather_bounded(
    work: Iterable[Coroutine[Any, Any, R]], sizes: Iterable[int] | None = None
) -> list[R]:
    """Run coroutines concurrently, from 8 to 64 of them, as many as the window has room for.

    A link of long delay takes many objects at once, until together they fill it. The first failure
    cancels the others.

    Args:
        work: Coroutines, started in this order.
        sizes: Bytes that each one moves; without them, only 8 run at once.

    Returns:
        The results, in order.

    """
    window = _Window()

    async def run(coroutine: Coroutine[Any, Any, R], num_bytes: int) -> R:
        async with window.room(num_bytes):
            return await coroutine

    coroutines = list(work)
    sizes = repeat(WINDOW_BYTES) if sizes is None else sizes
    tasks = [asyncio.ensure_future(run(*pair)) for pair in zip(coroutines, sizes, strict=False)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for coroutine in coroutines:
            coroutine.close()  # those that never started


async def for_each_shard(
    act: Callable[[ShardRef], Coroutine[Any, Any, R]], shards: Sequence[ShardRef]
) -> list[R]:
    """Act on every object of a version, as many at once as the window has room for."""
    return await gather_bounded(map(act, shards), (shard.num_bytes for shard in shards))
