"""A pool of pre-warmed machines, lent by lease.

A machine's life, each arrow taken once:

    booting -> idle -> leased -> closed       (single use: never back to idle)
       |         `-- died ---------^
       `-- failed: the oldest waiter gets the error, the next boot waits a little

`live_max` bounds booting + idle + leased + closing, so memory is bounded whatever is asked for.
Idle machines wait in stocks, one an image (`stocks.py`); `machines.py` boots and ends them, and
`keeper.py` does what goes on by itself.
"""

import asyncio
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.envs.microvm.images.images import Images
from penstock.envs.microvm.pool.image_pool import Stock
from penstock.envs.microvm.pool.image_pools import Stocks
from penstock.envs.microvm.pool.lease import Lease, Leases, PoolCounters, percentile
from penstock.envs.microvm.pool.reconciler import Keeper
from penstock.envs.microvm.pool.restores import Restores
from penstock.envs.sandbox import (
    Backend,
    Capability,
    SandboxError,
    SandboxTimeout,
    require,
)
from penstock.messages.errors import DeadlineError, NotFoundError, QueueFullError

BOOTS_AT_ONCE = 2
WAITERS_MAX = 4096
CLOSE_S_MAX = 30.0
"""Above what one machine takes that the host is slow to end (`HANG_GRACE_S`)."""


class Pool:
    """Keeps `size` machines ready and lends them.

    Args:
        backend: Boots the machines.
        size: Idle machines to keep.
        live_max: Bound on all machines that exist.
        images: Other images that machines may have; None: there are no others.
        boots_at_once: Bound on concurrent boots.
        boot_timeout_s: Deadline of one boot.
        monotonic: The time that leases run by; a simulation has its own.

    Example:
        async with Pool(open_backend("uml"), size=4, live_max=16) as pool:
            lease = await pool.acquire(lease_s=60.0)
            result = await lease.sandbox.exec(["true"], timeout_s=5.0)
            await pool.release(lease.lease_id)

    """

    def __init__(  # noqa: PLR0913
        self,
        backend: Backend,
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
        self._stocks = Stocks(backend, size, images)
        self._leases = Leases(monotonic)
        self._keeper = Keeper(
            self._stocks,
            self._leases,
            monotonic,
            live_max=live_max,
            boots_at_once=boots_at_once,
            boot_timeout_s=boot_timeout_s,
        )
        self._machines = self._keeper.machines
        self._restores = Restores(self._machines, self._leases, boot_timeout_s)
        self._closed = False
        self._num_held_back = 0

    async def __aenter__(self) -> Self:
        """Start warming machines."""
        self._keeper.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every machine."""
        await self.close()

    def ready_images(self) -> list[str]:
        """Return the images that are ready, besides the pool's own."""
        return self._stocks.ready()

    async def acquire(
        self,
        lease_s: float,
        *,
        lease_id: str | None = None,
        timeout_s: float = 60.0,
        image: str = "",
        num_spared: int = 0,
    ) -> Lease:
        """Lend a machine.

        Args:
            lease_s: The machine is reaped this long after the lease's last renewal.
            lease_id: Asking twice with one id gives the same machine; by default a new one.
            timeout_s: Bound on the wait for the image and a free machine.
            image: Digest of its layer; empty: the pool's own image.
            num_spared: Machines that must be left for others: it waits until so many more than its
                own may be lent.

        Raises:
            DeadlineError: No machine came free in time.
            QueueFullError: `WAITERS_MAX` wait already.
            ImageAbsent: The image is not to be had.
            SandboxError: Booting failed.

        """
        lease_id = lease_id or uuid.uuid4().hex
        if lease := self._leases.renewed(lease_id):
            return lease
        try:
            async with asyncio.timeout(timeout_s):
                stock = await self._stock(image)
                while await self._held_back(lease_id, num_spared):
                    stock = await self._stock(image)  # It may have made way meanwhile.
                if lease := self._leases.renewed(lease_id):
                    return lease
                return await self._granted(stock, lease_id, lease_s)
        except TimeoutError:
            raise DeadlineError(
                f"sandbox pool: no machine within {timeout_s:g} s "
                f"({len(self._leases)} leased of at most {self.live_max})"
            ) from None

    async def _stock(self, image: str) -> Stock:
        try:
            return await self._stocks.get(image)
        except asyncio.CancelledError:
            self._refuse_if_closed()
            raise

    async def _held_back(self, lease_id: str, num_spared: int) -> bool:
        """Wait for a look if one more leaves too few machines for others; tell whether it did."""
        has_room = not num_spared or self._num_wanted() + num_spared < self.live_max
        if has_room or lease_id in self._leases.ids():
            return False
        self._refuse_if_closed()
        self._refuse_if_many_wait()
        self._num_held_back += 1
        try:
            await self._keeper.look()
        finally:
            self._num_held_back -= 1
        return True

    def _num_wanted(self) -> int:
        """Return how many machines are lent, or will be as soon as they are there."""
        waiting = sum(stock.num_waiting for stock in self._stocks)
        return len(self._leases) + len(self._restores.tasks) + waiting

    async def _granted(self, stock: Stock, lease_id: str, lease_s: float) -> Lease:
        self._refuse_if_closed()
        self._refuse_if_many_wait()
        want = stock.want(lease_id, lease_s)
        self._keeper.hand_out(stock)
        try:
            return await want.wait()
        finally:
            stock.withdraw(want)

    def _refuse_if_many_wait(self) -> None:
        if self._waiting() >= WAITERS_MAX:
            raise QueueFullError(f"sandbox pool: {WAITERS_MAX} wait for a machine already")

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox pool is closed")

    async def restore(
        self, folder: Path, lease_s: float, *, lease_id: str, image: str = "", num_spared: int = 0
    ) -> Lease:
        """Lend a machine that goes on from a checkpoint; idle machines make room for it.

        Args:
            folder: The checkpoint.
            lease_s: As in `acquire`.
            lease_id: Asking twice with one id gives the same machine.
            image: That of the saved machine.
            num_spared: As in `acquire`, but nothing is waited for.

        Raises:
            CapabilityMissing: The backend cannot.
            QueueFullError: `live_max` machines exist and none is idle, or only as many as are
                spared may be lent.
            SandboxError: The checkpoint is broken, or the machine did not come up.

        """
        require(self.backend, [Capability.CHECKPOINT])
        if lease := self._leases.renewed(lease_id):
            return lease
        stock = await self._stock(image)
        restoring = self._restores.find(lease_id)
        if restoring is None:
            if self._closed or self._num_wanted() + num_spared >= self.live_max:
                raise QueueFullError(f"sandbox pool: {self.live_max} machines exist already")
            restoring = self._restores.begin(stock, folder, lease_id, lease_s)
        try:
            return await asyncio.shield(restoring)
        except asyncio.CancelledError:
            if restoring.cancelled():
                self._refuse_if_closed()
            raise

    def lease(self, lease_id: str) -> Lease:
        """Return a lease and renew it.

        Raises:
            NotFoundError: It was never given, or has expired, or was released.

        """
        lease = self._leases.renewed(lease_id)
        if lease is None:
            raise NotFoundError(f"sandbox lease {lease_id!r}: expired, released or never given")
        return lease

    def lease_ids(self) -> set[str]:
        """Return the leases that are held now; asking renews none."""
        return self._leases.ids()

    async def release(self, lease_id: str) -> None:
        """End a lease and its machine; releasing twice does nothing."""
        machine = self._leases.end(lease_id)
        if machine is not None:
            await self._machines.end(machine)

    def counters(self) -> PoolCounters:
        """Return what the pool has done and holds now."""
        machines = self._machines
        times = sorted(machines.boot_ms)
        return PoolCounters(
            booted=machines.tally["booted"],
            boot_failures=machines.tally["boot_failures"],
            deaths=machines.tally["deaths"],
            expired=self._leases.num_expired,
            close_failures=machines.tally["close_failures"],
            restored=self._restores.num_done,
            live=machines.num_live,
            idle=sum(len(stock.idle) for stock in self._stocks),
            leased=len(self._leases),
            waiting=self._waiting(),
            boot_ms_p50=percentile(times, 50),
            boot_ms_p99=percentile(times, 99),
        )

    def _waiting(self) -> int:
        return self._num_held_back + sum(stock.num_waiting for stock in self._stocks)

    async def close(self, *, deadline_s: float = CLOSE_S_MAX) -> None:
        """End every machine and refuse further requests; who waits gets an error.

        Raises:
            SandboxTimeout: Some still start or end at the deadline; the kernel ends them with
                this process.

        """
        give_up_at = time.monotonic() + deadline_s
        self._closed = True
        await self._keeper.stop()
        for stock in self._stocks:
            stock.refuse(SandboxError("the sandbox pool is closed"))
        starts = (*self._restores.tasks, *self._stocks.opening)
        late = await self._machines.close(give_up_at, starts)
        for lease_id in self._leases.ids():
            self._leases.end(lease_id)
        if late:
            words = f"{late} machines still start or end after {deadline_s:g} s"
            raise SandboxTimeout(f"sandbox pool: {words}")
