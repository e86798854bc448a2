"""A pool's stocks: that of its own image, and those of the images that tasks asked for last."""

import asyncio
from collections.abc import Iterator

from penstock.envs.microvm.images.images import Images
from penstock.envs.microvm.pool.image_pool import Stock
from penstock.envs.sandbox import Backend, ImageAbsent, Machine

NUM_READY = 1
"""Idle machines kept of an image that a task names."""


class Stocks:
    """Opens a stock when its image is first asked for, and gives up the one not used for longest.

    Args:
        backend: Of the pool's own image, which stays.
        size: Idle machines to keep of that.
        images: Where other images come from; None: there are no others.

    """

    def __init__(self, backend: Backend, size: int, images: Images | None) -> None:
        self._own = Stock(backend, size)
        self._images = images
        self._others: dict[str, Stock] = {}
        """Digest -> stock, the one asked for last at the end."""
        self._opening: dict[str, asyncio.Task[Stock]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._given_up: list[Machine] = []
        """Idle machines of stocks that are no more."""

    def __iter__(self) -> Iterator[Stock]:
        """Yield all: the pool's own first, then those not asked for for longest."""
        yield self._own
        yield from self._others.values()

    @property
    def opening(self) -> list[asyncio.Task[Stock]]:
        """Images on the way."""
        return list(self._opening.values())

    def ready(self) -> list[str]:
        """Return the digests of the images that machines can have at once."""
        return [image for image, stock in self._others.items() if not stock.is_absent]

    async def get(self, image: str) -> Stock:
        """Return the stock of an image, opening it if need be; who leaves does not stop that.

        Raises:
            ImageAbsent: It is not to be had.
            SandboxError: It cannot be made ready.

        """
        if not image:
            return self._own
        stock = self._others.get(image)
        if stock is not None and not stock.is_absent:
            self._others[image] = self._others.pop(image)
            return stock
        if image not in self._opening:
            opening = self._opening[image] = asyncio.create_task(self._open(image))
            opening.add_done_callback(_take_note)
        return await asyncio.shield(self._opening[image])

    async def _open(self, image: str) -> Stock:
        try:
            if self._images is None:
                raise ImageAbsent(f"image absent: this host has one image, not {image!r}")
            async with self._one_at_a_time:
                backend = await self._images.open(image, self.ready())
            stock = self._others.pop(image, None) or Stock(backend, NUM_READY)
            stock.opened(backend)
            self._others[image] = stock
            self._trim(newest=image)
            return stock
        finally:
            del self._opening[image]

    def _trim(self, newest: str) -> None:
        """Give up stocks beyond the bound, unless somebody waits for a machine of theirs."""
        assert self._images is not None, "others were opened"
        idle = [i for i, stock in self._others.items() if not stock.in_use and i != newest]
        for image in idle[: max(0, len(self._others) - self._images.num_max)]:
            self._given_up += self._others.pop(image).idle

    def take_useless(self) -> list[Machine]:
        """Give up the idle machines that died, or that nobody can get any more."""
        dead = [machine for stock in self for machine in stock.take_dead()]
        machines, self._given_up = dead + self._given_up, []
        return machines

    def take_idle(self, num_machines: int) -> list[Machine]:
        """Give up so many idle machines, of the image not asked for for longest first, own last."""
        stocks = (*self._others.values(), self._own)
        idle = [(stock, machine) for stock in stocks for machine in stock.idle]
        chosen = idle[:num_machines]
        for stock, machine in chosen:
            stock.idle.remove(machine)
        return [machine for _, machine in chosen]


def _take_note(opening: asyncio.Task[Stock]) -> None:
    """Look at how it ended: those who asked may all have left."""
    if not opening.cancelled():
        opening.exception()
