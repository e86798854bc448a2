"""Manages the image pools of a host: one for its default image, others on request."""

import asyncio
import logging
from collections.abc import Iterator
from typing import NamedTuple

from penstock.envs.microvm.images.layers import IMAGES_MAX, Images
from penstock.envs.microvm.pool.image_pool import ImagePool
from penstock.envs.needs import SizedBackend, fit_machine_size
from penstock.envs.sandbox import ImageAbsent, Machine, NeedsRefused, SandboxBackend
from penstock.messages.task import MachineNeeds

log = logging.getLogger(__name__)

NUM_READY = 1
"""Idle machines to keep ready for each image or size that tasks request."""


class PoolKey(NamedTuple):
    """Image and size that identify a pool."""

    image: str
    """Digest of the image layer; empty: the default image."""
    size: MachineNeeds | None
    """Size of the machines; None: the default size."""


class ImagePools:
    """Opens an image pool on first request, and evicts the least recently requested one.

    Args:
        backend: Backend of the default image, whose pool is never evicted.
        size: Idle machines to keep ready of the default image.
        images: Source of other images; None: there are no others.
        live_max: Maximum machines of the default size on the host.

    """

    def __init__(
        self, backend: SandboxBackend, size: int, images: Images | None, live_max: int
    ) -> None:
        self._live_max = live_max
        self._default = ImagePool(backend, size)
        self._images = images
        self._others: dict[PoolKey, ImagePool] = {}
        """Pools of other images and sizes, least recently requested first."""
        self._opening: dict[PoolKey, asyncio.Task[ImagePool]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._evicted: list[Machine] = []
        """Idle machines of evicted pools, to be ended."""

    def __iter__(self) -> Iterator[ImagePool]:
        """Yield the pool of the default image, then the others, least recently requested first."""
        yield self._default
        yield from self._others.values()

    @property
    def opening(self) -> list[asyncio.Task[ImagePool]]:
        """Tasks that open image pools."""
        return list(self._opening.values())

    def ready(self) -> list[str]:
        """Return the digests of the image layers that are open and available."""
        ready = [key.image for key, pool in self._others.items() if not pool.is_absent]
        return [image for image in dict.fromkeys(ready) if image]

    async def get(self, image: str, needs: MachineNeeds) -> ImagePool:
        """Return the pool of an image and size, opening it if necessary.

        Raises:
            ImageAbsent: The image is not available.
            NeedsRefused: The host offers less than the task needs.
            SandboxError: The image cannot be opened.

        """
        size, num_slots = self._sized(needs)
        if not image and size is None:
            return self._default
        key = PoolKey(image, size)
        pool = self._others.get(key)
        if pool is not None and not pool.is_absent:
            self._others[key] = self._others.pop(key)  # now the most recently requested
            return pool
        if key not in self._opening:
            opening = self._opening[key] = asyncio.create_task(self._open(key, num_slots))
            # Retrieves the error: asyncio complains otherwise if all clients have gone meanwhile.
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        # Shielded: clients that wait for the same pool must not lose it when one of them gives up.
        return await asyncio.shield(self._opening[key])

    def _sized(self, needs: MachineNeeds) -> tuple[MachineNeeds | None, int]:
        """Return the size, None for the default, and the number of slots of such a machine."""
        if needs == MachineNeeds():
            return None, 1
        backend = self._default.backend
        if not isinstance(backend, SizedBackend):
            raise NeedsRefused(f"machine: the task needs {needs}, machines here have one size")
        size, num_slots = fit_machine_size(needs, backend.needs, backend, self._live_max)
        return (None, 1) if size == backend.needs else (size, num_slots)

    async def _open(self, key: PoolKey, num_slots: int) -> ImagePool:
        try:
            backend = await self._backend(key)
            pool = self._others.pop(key, None) or ImagePool(backend, NUM_READY, num_slots)
            pool.opened(backend)
            self._others[key] = pool
            self._evict(newest=key, num_max=self._images.num_max if self._images else IMAGES_MAX)
            log.info("pool of image %s, size %s opened", key.image[:16] or "default", key.size)
            return pool
        finally:
            del self._opening[key]

    async def _backend(self, key: PoolKey) -> SandboxBackend:
        backend = self._default.backend
        if key.image:
            if self._images is None:
                raise ImageAbsent(f"image absent: this host has only one image, not {key.image!r}")
            # Opening may copy and remove files of the host's folder, which two must not do at once.
            async with self._one_at_a_time:
                backend = await self._images.open(key.image, self.ready())
        if key.size is not None and isinstance(backend, SizedBackend):
            return backend.resized(key.size)
        return backend

    def _evict(self, newest: PoolKey, num_max: int) -> None:
        """Drop the pools least recently requested beyond the maximum, except those in use."""
        unused = [key for key, pool in self._others.items() if not pool.in_use and key != newest]
        for key in unused[: max(0, len(self._others) - num_max)]:
            self._evicted += self._others.pop(key).idle

    def take_useless(self) -> list[Machine]:
        """Remove and return idle machines that have died or whose pool was evicted."""
        dead = [machine for pool in self for machine in pool.take_dead()]
        machines, self._evicted = dead + self._evicted, []
        return machines

    def take_idle(self, num_machines: int) -> list[Machine]:
        """Remove and return idle machines, those of the least recently requested image first."""
        pools = (*self._others.values(), self._default)
        chosen = [(pool, machine) for pool in pools for machine in pool.idle][:num_machines]
        for pool, machine in chosen:
            pool.idle.remove(machine)
        return [machine for _, machine in chosen]
