"""Pool of pre-warmed machines, leased for a limited time.

Life of a machine, in which each arrow is taken at most once:

    booting -> idle -> leased -> closed       (single use: never back to idle)
       |         `-- died ---------^
       `-- failed: the oldest pending lease fails, the next boot is delayed

`live_max` bounds the sum of booting, idle, leased and closing machines, and thereby their memory.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Self, cast

from penstock.envs.microvm.images.layers import Images
from penstock.envs.microvm.pool.image_pool import ImagePool
from penstock.envs.microvm.pool.image_pools import ImagePools
from penstock.envs.microvm.pool.lease import Lease, Leases, PoolCounters
from penstock.envs.microvm.pool.reconciler import PoolReconciler
from penstock.envs.needs import DEFAULT_NEEDS
from penstock.envs.sandbox import (
    Capability,
    Machine,
    SandboxBackend,
    SandboxError,
    SandboxTimeout,
    SavingBackend,
    require,
)
from penstock.messages.errors import DeadlineError, NotFoundError, QueueFullError
from penstock.messages.task import MachineNeeds
from penstock.messages.telemetry import percentile

log = logging.getLogger(__name__)

BOOTS_AT_ONCE = 2
WAITERS_MAX = 4096
"""Maximum requests that wait for a machine; more are refused."""
CLOSE_S_MAX = 30.0
"""Maximum seconds to close a pool; longer than `HANG_GRACE_S`, the limit for ending one machine."""


class Pool:
    """Keeps `size` machines ready and leases them.

    Args:
        backend: Backend that boots the machines.
        size: Idle machines to keep ready.
        live_max: Maximum machines that exist at once; a larger machine counts as several, by
            memory.
        images: Source of other images; None: there are no others.
        boots_at_once: Maximum concurrent boots.
        boot_timeout_s: Maximum seconds of one boot.
        monotonic: Clock by which leases expire; a simulation passes its own.

    """

    def __init__(  # noqa: PLR0913
        self,
        backend: SandboxBackend,
        *,
        size: int,
        live_max: int,
        images: Images | None = None,
        boots_at_once: int = BOOTS_AT_ONCE,
        boot_timeout_s: float = 20.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= size <= live_max or live_max < 1:
            raise ValueError(f"pool: expected 0 <= size <= live_max >= 1, got {size}, {live_max}")
        self.backend = backend
        self.live_max = live_max
        self._boot_timeout_s = boot_timeout_s
        self._image_pools = ImagePools(backend, size, images, live_max)
        self._leases = Leases(monotonic)
        self._reconciler = PoolReconciler(
            self._image_pools,
            self._leases,
            monotonic,
            live_max=live_max,
            boots_at_once=boots_at_once,
            boot_timeout_s=boot_timeout_s,
        )
        self._restores: dict[str, asyncio.Task[Lease]] = {}
        """Tasks that restore a saved machine, by lease id."""
        self._num_restored = 0
        self._num_held_back = 0
        self._closed = False

    async def __aenter__(self) -> Self:
        """Start booting machines."""
        self._reconciler.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End every machine."""
        await self.close()

    def ready_images(self) -> list[str]:
        """Return the digests of the images that are ready, in addition to the default one."""
        return self._image_pools.ready()

    async def acquire(  # noqa: PLR0913
        self,
        lease_s: float,
        *,
        lease_id: str | None = None,
        timeout_s: float = 60.0,
        image: str = "",
        machine: MachineNeeds = DEFAULT_NEEDS,
        reserved_slots: int = 0,
    ) -> Lease:
        """Lease a machine.

        Args:
            lease_s: Seconds after the last renewal at which the machine is ended.
            lease_id: Id of the lease; repeated requests with one id get the same machine. Defaults
                to a new id.
            timeout_s: Maximum seconds to wait for the image and a free machine.
            image: Digest of the image layer; empty: the default image.
            machine: Minimum size and isolation.
            reserved_slots: Machines to leave available to others; the call waits until it can.

        Raises:
            DeadlineError: No machine became free in time.
            QueueFullError: `WAITERS_MAX` requests wait already.
            ImageAbsent: The image is not available.
            NeedsRefused: The host offers less than the task needs.
            SandboxError: Booting failed.

        """
        lease_id = lease_id or uuid.uuid4().hex
        if lease := self._leases.renewed(lease_id):
            return lease
        try:
            async with asyncio.timeout(timeout_s):
                image_pool = await self._image_pool(image, machine)
                while await self._held_back(lease_id, reserved_slots):
                    # Again after each wait, during which the pool may have been evicted.
                    image_pool = await self._image_pool(image, machine)
                # A repeat of this request may have been granted during the waits.
                if lease := self._leases.renewed(lease_id):
                    return lease
                return await self._granted(image_pool, lease_id, lease_s)
        except TimeoutError:
            raise DeadlineError(
                f"sandbox pool: no machine within {timeout_s:g} s "
                f"({len(self._leases)} leased of at most {self.live_max})"
            ) from None

    async def _image_pool(self, image: str, machine: MachineNeeds) -> ImagePool:
        try:
            return await self._image_pools.get(image, machine)
        except asyncio.CancelledError:
            # Closing cancels the opening of images; clients should see the reason instead.
            self._refuse_if_closed()
            raise

    async def _held_back(self, lease_id: str, reserved_slots: int) -> bool:
        """Return whether a lease would take a reserved slot, after waiting for one pass if so."""
        has_room = not reserved_slots or self._num_requested() + reserved_slots < self.live_max
        if has_room or lease_id in self._leases.ids():
            return False
        self._refuse_to_wait()
        self._num_held_back += 1
        try:
            await self._reconciler.next_pass()
        finally:
            self._num_held_back -= 1
        return True

    def _num_pending(self) -> int:
        return sum(image_pool.num_pending for image_pool in self._image_pools)

    def _num_requested(self) -> int:
        """Return the number of machines that are leased, or will be once they have booted."""
        return len(self._leases) + len(self._restores) + self._num_pending()

    async def _granted(self, image_pool: ImagePool, lease_id: str, lease_s: float) -> Lease:
        self._refuse_to_wait()
        pending = image_pool.request(lease_id, lease_s)
        self._reconciler.grant(image_pool)
        try:
            return await pending.wait()
        finally:
            image_pool.withdraw(pending)

    def _refuse_to_wait(self) -> None:
        self._refuse_if_closed()
        if self._num_held_back + self._num_pending() >= WAITERS_MAX:
            raise QueueFullError(f"sandbox pool: {WAITERS_MAX} requests wait for a machine already")

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox pool is closed")

    async def restore(  # noqa: PLR0913
        self,
        folder: Path,
        lease_s: float,
        *,
        lease_id: str,
        image: str = "",
        machine: MachineNeeds = DEFAULT_NEEDS,
        reserved_slots: int = 0,
    ) -> Lease:
        """Lease a machine that resumes from a checkpoint, ending idle machines if room is needed.

        Args:
            folder: Folder of the checkpoint.
            lease_s: Seconds after the last renewal at which the machine is ended.
            lease_id: Id of the lease; repeated requests with one id get the same machine.
            image: Digest of the saved machine's image layer; empty: the default image.
            machine: Size of the saved machine.
            reserved_slots: Machines to leave available to others; the call does not wait for them.

        Raises:
            CapabilityMissing: The backend cannot save machines.
            QueueFullError: `live_max` machines exist and none is idle, or the rest is reserved.
            SandboxError: The checkpoint is damaged, or the machine did not start.

        """
        require(self.backend, [Capability.CHECKPOINT])
        if lease := self._leases.renewed(lease_id):
            return lease
        image_pool = await self._image_pool(image, machine)
        restoring = self._restores.get(lease_id)
        if restoring is None:
            if self._closed or self._num_requested() + reserved_slots >= self.live_max:
                raise QueueFullError(f"sandbox pool: {self.live_max} machines exist already")
            ended_first = self._reconciler.make_room(image_pool.num_slots)
            # Counted before the task runs, so that the room is not given to another machine.
            image_pool.num_booting += 1
            work = self._restore(image_pool, folder, lease_id, lease_s, ended_first)
            restoring = self._restores[lease_id] = asyncio.create_task(work)
        try:
            # Shielded: a repeated request may wait for the same machine.
            return await asyncio.shield(restoring)
        except asyncio.CancelledError:
            # Either this client gave up, or closing the pool cancelled the task.
            if restoring.cancelled():
                self._refuse_if_closed()
            raise

    async def _restore(
        self,
        image_pool: ImagePool,
        folder: Path,
        lease_id: str,
        lease_s: float,
        ended_first: list[Machine],
    ) -> Lease:
        backend = cast(SavingBackend, image_pool.backend)

        async def start(cpu: int) -> Machine:
            # Their memory must be free before the new machine takes it.
            for machine in ended_first:
                await self._reconciler.end(machine)
            return await backend.restore(folder, cpu=cpu, timeout_s=self._boot_timeout_s)

        try:
            machine = await self._reconciler.start_machine(image_pool, start)
        finally:
            self._restores.pop(lease_id, None)
        self._num_restored += 1
        log.debug("lease %s resumed from %s", lease_id, folder.name)
        return self._leases.grant(lease_id, machine, lease_s)

    def lease(self, lease_id: str) -> Lease:
        """Renew and return a lease.

        Raises:
            NotFoundError: The lease was never granted, has expired, or was released.

        """
        lease = self._leases.renewed(lease_id)
        if lease is None:
            raise NotFoundError(f"sandbox lease {lease_id!r}: expired, released or never granted")
        return lease

    def lease_ids(self) -> set[str]:
        """Return the ids of the leases that are held now, without renewing them."""
        return self._leases.ids()

    async def release(self, lease_id: str) -> None:
        """End a lease and its machine; a repeated call does nothing."""
        machine = self._leases.end(lease_id)
        if machine is not None:
            await self._reconciler.end(machine)

    def counters(self) -> PoolCounters:
        """Return the totals and the current state of the pool."""
        tally, boot_ms = self._reconciler.tally, self._reconciler.boot_ms
        return PoolCounters(
            booted=tally["booted"],
            boot_failures=tally["boot_failures"],
            deaths=tally["deaths"],
            expired=self._leases.num_expired,
            close_failures=tally["close_failures"],
            restored=self._num_restored,
            live=self._reconciler.num_live,
            idle=sum(len(image_pool.idle) for image_pool in self._image_pools),
            leased=len(self._leases),
            waiting=self._num_held_back + self._num_pending(),
            boot_ms_p50=percentile(boot_ms, 50),
            boot_ms_p99=percentile(boot_ms, 99),
        )

    async def close(self, *, deadline_s: float = CLOSE_S_MAX) -> None:
        """End every machine and refuse further requests; pending leases fail.

        Raises:
            SandboxTimeout: Machines are still starting or ending at the deadline. The kernel ends
                them together with this process.

        """
        give_up_at = time.monotonic() + deadline_s
        # Set first: requests that wake up during the steps below must be refused.
        self._closed = True
        await self._reconciler.stop()
        for image_pool in self._image_pools:
            image_pool.refuse(SandboxError("the sandbox pool is closed"))
        starts = (*self._restores.values(), *self._image_pools.opening)
        late = await self._reconciler.close(give_up_at, starts)
        for lease_id in self._leases.ids():
            self._leases.end(lease_id)
        if late:
            raise SandboxTimeout(
                f"sandbox pool: {late} machines are still starting or ending after {deadline_s:g} s"
            )
