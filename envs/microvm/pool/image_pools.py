"""All image pools of a host: its default image, and the images that tasks requested last."""

import asyncio
from collections.abc import Iterator

from penstock.envs.microvm.images.layers import Images
from penstock.envs.microvm.pool.image_pool import ImagePool
from penstock.envs.sandbox import ImageAbsent, Machine, SandboxBackend

NUM_READY = 1
"""Idle machines kept of an image that a task names."""


class ImagePools:
    """Opens an image pool on first request, and evicts the least recently requested one.

    Args:
        backend: Of the default image, whose pool is never evicted.
        size: Idle machines to keep of that image.
        images: Source of other images; None: there are no others.

    """

    def __init__(self, backend: SandboxBackend, size: int, images: Images | None) -> None:
        self._default = ImagePool(backend, size)
        self._images = images
        self._others: dict[str, ImagePool] = {}
        """Digest -> pool, least recently requested first."""
        self._opening: dict[str, asyncio.Task[ImagePool]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._evicted: list[Machine] = []
        """Idle machines of pools that are no more."""

    def __iter__(self) -> Iterator[ImagePool]:
        """Yield all: the default image's first, then least recently requested first."""
        yield self._default
        yield from self._others.values()

    @property
    def opening(self) -> list[asyncio.Task[ImagePool]]:
        """Images that are being opened."""
        return list(self._opening.values())

    def ready(self) -> list[str]:
        """Return the digests of the images that machines can have at once."""
        return [image for image, pool in self._others.items() if not pool.is_absent]

    async def get(self, image: str) -> ImagePool:
        """Return the pool of an image, opening it if needed; cancelling does not stop that.

        Raises:
            ImageAbsent: It is not available.
            SandboxError: It cannot be made ready.

        """
        if not image:
            return self._default
        pool = self._others.get(image)
        if pool is not None and not pool.is_absent:
            self._others[image] = self._others.pop(image)
            return pool
        if image not in self._opening:
            opening = self._opening[image] = asyncio.create_task(self._open(image))
            # Read its error: every client may have gone meanwhile.
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._opening[image])

    async def _open(self, image: str) -> ImagePool:
        try:
            if self._images is None:
                raise ImageAbsent(f"image absent: this host has one image, not {image!r}")
            async with self._one_at_a_time:
                backend = await self._images.open(image, self.ready())
            pool = self._others.pop(image, None) or ImagePool(backend, NUM_READY)
            pool.opened(backend)
            self._others[image] = pool
            self._evict(newest=image, num_max=self._images.num_max)
            return pool
        finally:
            del self._opening[image]

    def _evict(self, newest: str, num_max: int) -> None:
        """Drop pools beyond the bound, except those in use."""
        unused = [i for i, pool in self._others.items() if not pool.in_use and i != newest]
        for image in unused[: max(0, len(self._others) - num_max)]:
            self._evicted += self._others.pop(image).idle

    def take_useless(self) -> list[Machine]:
        """Remove and return idle machines that died, or whose pool was evicted."""
        dead = [machine for pool in self for machine in pool.take_dead()]
        machines, self._evicted = dead + self._evicted, []
        return machines

    def take_idle(self, num_machines: int) -> list[Machine]:
        """Remove and return idle machines, of the least recently requested image first."""
        pools = (*self._others.values(), self._default)
        chosen = [(pool, machine) for pool in pools for machine in pool.idle][:num_machines]
        for pool, machine in chosen:
            pool.idle.remove(machine)
        return [machine for _, machine in chosen]
