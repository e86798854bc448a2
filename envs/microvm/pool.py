"""A pool of pre-warmed machines, lent by lease.

A machine's life, each arrow taken once:

    booting -> idle -> leased -> closed       (single use: never back to idle)
       |         `-- died ---------^
       `-- failed: the oldest waiter gets the error, the next boot waits a little

`live_max` bounds booting + idle + leased + closing, so memory is bounded whatever is asked for.
"""

import asyncio
import contextlib
import os
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from penstock.envs.microvm.lease import Lease, PoolCounters, Want, percentile
from penstock.envs.sandbox import (
    Backend,
    Capability,
    Machine,
    SandboxError,
    SandboxTimeout,
    SavingBackend,
    require,
)
from penstock.messages.errors import DeadlineError, NotFoundError, QueueFullError

BOOTS_AT_ONCE = 2
WAITERS_MAX = 4096
BACKOFF_S_MAX = 5.0
BOOT_MS_KEPT = 4096
TICK_S_MAX = 1.0
CLOSE_S_MAX = 30.0
"""Above what one machine takes that the host is slow to end (`HANG_GRACE_S`)."""


class Pool:
    """Keeps `size` machines ready and lends them.

    Args:
        backend: Boots the machines.
        size: Idle machines to keep.
        live_max: Bound on all machines that exist.
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
        boots_at_once: int = BOOTS_AT_ONCE,
        boot_timeout_s: float = 20.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= size <= live_max or live_max < 1:
            raise ValueError(f"pool: expected 0 <= size <= live_max >= 1, got {size}, {live_max}")
        self.backend = backend
        self._size = size
        self._monotonic = monotonic
        self.live_max = live_max
        self._boots_at_once = boots_at_once
        self._boot_timeout_s = boot_timeout_s
        self._cpus = sorted(os.sched_getaffinity(0))
        self._cpu_load: Counter[int] = Counter()
        self._cpu_of: dict[Machine, int] = {}
        self._idle: deque[Machine] = deque()
        self._leases: dict[str, Lease] = {}
        self._wants: dict[str, Want] = {}
        """In the order of asking."""
        self._boots: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()
        self._restores: dict[str, asyncio.Task[Lease]] = {}
        self._booting = 0
        self._closed = False
        self._retry_at = 0.0
        self._backoff_s = 0.0
        self._wake = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._tally: Counter[str] = Counter()
        self._boot_ms: deque[float] = deque(maxlen=BOOT_MS_KEPT)

    async def __aenter__(self) -> Self:
        """Start warming machines."""
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every machine."""
        await self.close()

    async def acquire(
        self, lease_s: float, *, lease_id: str | None = None, timeout_s: float = 60.0
    ) -> Lease:
        """Lend a machine.

        Args:
            lease_s: The machine is reaped this long after the lease's last renewal.
            lease_id: Asking twice with one id gives the same machine; by default a new one.
            timeout_s: Bound on the wait for a free machine.

        Raises:
            DeadlineError: No machine came free in time.
            QueueFullError: `WAITERS_MAX` wait already.
            SandboxError: Booting failed.

        """
        lease_id = lease_id or uuid.uuid4().hex
        if lease_id in self._leases:
            return self.lease(lease_id)
        want = self._wants.get(lease_id) or self._want(lease_id, lease_s)
        try:
            return await want.wait(timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"sandbox pool: no machine within {timeout_s:g} s "
                f"({len(self._leases)} leased of at most {self.live_max})"
            ) from None
        finally:
            if want.given.done():
                self._wants.pop(lease_id, None)

    def _want(self, lease_id: str, lease_s: float) -> Want:
        if self._closed:
            raise SandboxError("the sandbox pool is closed")
        if len(self._wants) >= WAITERS_MAX:
            raise QueueFullError(f"sandbox pool: {WAITERS_MAX} wait for a machine already")
        want = self._wants[lease_id] = Want(lease_id, lease_s)
        self._hand_out()
        self._wake.set()
        return want

    async def restore(self, folder: Path, lease_s: float, *, lease_id: str) -> Lease:
        """Lend a machine that goes on from a checkpoint; no machine is kept ready for that.

        Args:
            folder: The checkpoint.
            lease_s: As in `acquire`.
            lease_id: Asking twice with one id gives the same machine.

        Raises:
            CapabilityMissing: The backend cannot.
            QueueFullError: `live_max` machines exist.
            SandboxError: The checkpoint is broken, or the machine did not come up.

        """
        require(self.backend, [Capability.CHECKPOINT])
        if lease_id in self._leases:
            return self.lease(lease_id)
        restoring = self._restores.get(lease_id)
        if restoring is None:
            if self._closed or self._live() >= self.live_max:
                raise QueueFullError(f"sandbox pool: {self.live_max} machines exist already")
            self._booting += 1
            restoring = asyncio.create_task(self._restore(folder, lease_s, lease_id))
            self._restores[lease_id] = restoring
        try:
            return await asyncio.shield(restoring)
        except asyncio.CancelledError:
            if self._closed and restoring.cancelled():
                raise SandboxError("the sandbox pool is closed") from None
            raise

    async def _restore(self, folder: Path, lease_s: float, lease_id: str) -> Lease:
        cpu = min(self._cpus, key=lambda c: self._cpu_load[c])
        backend = cast(SavingBackend, self.backend)
        try:
            machine = await backend.restore(folder, cpu=cpu, timeout_s=self._boot_timeout_s)
        finally:
            self._booting -= 1
            self._restores.pop(lease_id, None)
        self._cpu_load[cpu] += 1
        self._cpu_of[machine] = cpu
        self._tally["restored"] += 1
        lease = self._leases[lease_id] = Lease(lease_id, machine, lease_s)
        lease.renew(self._monotonic())
        self._wake.set()
        return lease

    def lease(self, lease_id: str) -> Lease:
        """Return a lease and renew it.

        Raises:
            NotFoundError: It was never given, or has expired, or was released.

        """
        try:
            lease = self._leases[lease_id]
        except KeyError:
            raise NotFoundError(
                f"sandbox lease {lease_id!r}: expired, released or never given"
            ) from None
        lease.renew(self._monotonic())
        return lease

    def lease_ids(self) -> set[str]:
        """Return the leases that are held now; asking renews none."""
        return set(self._leases)

    async def release(self, lease_id: str) -> None:
        """End a lease and its machine; releasing twice does nothing."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            await self._end(lease.sandbox)

    def counters(self) -> PoolCounters:
        """Return what the pool has done and holds now."""
        times = sorted(self._boot_ms)
        return PoolCounters(
            booted=self._tally["booted"],
            boot_failures=self._tally["boot_failures"],
            deaths=self._tally["deaths"],
            expired=self._tally["expired"],
            close_failures=self._tally["close_failures"],
            restored=self._tally["restored"],
            live=self._live(),
            idle=len(self._idle),
            leased=len(self._leases),
            waiting=self._waiting(),
            boot_ms_p50=percentile(times, 50),
            boot_ms_p99=percentile(times, 99),
        )

    def _waiting(self) -> int:
        return sum(not want.given.done() for want in self._wants.values())

    def _live(self) -> int:
        return self._booting + len(self._cpu_of)

    async def close(self, *, deadline_s: float = CLOSE_S_MAX) -> None:
        """End every machine and refuse further requests; who waits gets an error.

        Raises:
            SandboxTimeout: Some still start or end at the deadline; the kernel ends them with
                this process.

        """
        give_up_at = time.monotonic() + deadline_s
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        for start in (*self._boots, *self._restores.values()):
            start.cancel()
        late = await _wait_until(give_up_at, {*self._boots, *self._ends, *self._restores.values()})
        for want in self._wants.values():
            if not want.given.done():
                want.given.set_exception(SandboxError("the sandbox pool is closed"))
        self._leases.clear()
        for sandbox in list(self._cpu_of):
            _spawn(self._end(sandbox), self._ends)
        late |= await _wait_until(give_up_at, set(self._ends))
        if late:
            words = f"{len(late)} machines still start or end after {deadline_s:g} s"
            raise SandboxTimeout(f"sandbox pool: {words}")

    async def _keep(self) -> None:
        while True:
            now = self._monotonic()
            for lease in [x for x in self._leases.values() if x.expires_at <= now]:
                self._tally["expired"] += 1
                _spawn(self.release(lease.lease_id), self._ends)
            self._drop_dead()
            self._boot_missing(now)
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._tick_s(now)):
                    await self._wake.wait()

    def _tick_s(self, now: float) -> float:
        times = [lease.expires_at for lease in self._leases.values()]
        if self._retry_at > now:
            times.append(self._retry_at)
        return min(TICK_S_MAX, max(0.001, min(times, default=now + TICK_S_MAX) - now))

    def _drop_dead(self) -> None:
        for sandbox in [x for x in self._idle if not x.alive]:
            self._idle.remove(sandbox)
            _spawn(self._end(sandbox), self._ends)

    def _boot_missing(self, now: float) -> None:
        missing = self._size + self._waiting() - len(self._idle) - self._booting
        room = min(self.live_max - self._live(), self._boots_at_once - self._booting)
        if now >= self._retry_at:
            for _ in range(min(missing, room)):
                self._booting += 1
                _spawn(self._boot(), self._boots)

    async def _boot(self) -> None:
        cpu = min(self._cpus, key=lambda c: self._cpu_load[c])
        self._cpu_load[cpu] += 1
        try:
            sandbox = await self.backend.start(cpu=cpu, timeout_s=self._boot_timeout_s)
        except SandboxError as error:
            self._cpu_load[cpu] -= 1
            self._boot_failed(error)
        else:
            self._cpu_of[sandbox] = cpu
            self._backoff_s = 0.0
            self._tally["booted"] += 1
            self._boot_ms.append(sandbox.info.boot_ms)
            self._idle.append(sandbox)
            self._hand_out()
        finally:
            self._booting -= 1
            self._wake.set()

    def _boot_failed(self, error: SandboxError) -> None:
        self._tally["boot_failures"] += 1
        self._backoff_s = min(BACKOFF_S_MAX, self._backoff_s * 2 or 0.1)
        self._retry_at = self._monotonic() + self._backoff_s
        want = self._next_want()
        if want is not None:
            want.given.set_exception(error)

    def _next_want(self) -> Want | None:
        return next((want for want in self._wants.values() if not want.given.done()), None)

    def _hand_out(self) -> None:
        self._drop_dead()
        while self._idle and (want := self._next_want()) is not None:
            lease = Lease(want.lease_id, self._idle.popleft(), want.lease_s)
            lease.renew(self._monotonic())
            self._leases[lease.lease_id] = lease
            want.given.set_result(lease)

    async def _end(self, sandbox: Machine) -> None:
        if sandbox not in self._cpu_of:
            return
        self._tally["deaths"] += not sandbox.alive
        try:
            await sandbox.close()
        except SandboxError:
            self._tally["close_failures"] += 1
        finally:
            cpu = self._cpu_of.pop(sandbox, None)
            if cpu is not None:
                self._cpu_load[cpu] -= 1
            self._wake.set()


def _spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _wait_until(give_up_at: float, tasks: set[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """Return which tasks still run at a time of `time.monotonic`; they are cancelled."""
    if not tasks:
        return set()
    _, late = await asyncio.wait(tasks, timeout=max(0.0, give_up_at - time.monotonic()))
    for task in late:
        task.cancel()
    return late
