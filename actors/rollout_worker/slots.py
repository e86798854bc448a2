"""How many episodes a worker has at once, whatever trees they belong to."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from penstock.actors.runtime.context import Context


class Slots:
    """Room for some episodes; who comes first is served first."""

    def __init__(self, num_max: int) -> None:
        """Begin with all of them free."""
        self._free = asyncio.Semaphore(num_max)
        self._num_held = 0

    @contextlib.asynccontextmanager
    async def hold(self, ctx: Context) -> AsyncGenerator[None]:
        """Wait for a slot and hold it for the time of the block; the gauge `episodes` tells."""
        async with self._free:
            self._count(ctx, 1)
            try:
                yield
            finally:
                self._count(ctx, -1)

    def _count(self, ctx: Context, change: int) -> None:
        self._num_held += change
        ctx.set_gauge("episodes", self._num_held)
