"""Reconciles the machines of a pool with the requests for them, within `live_max`.

```
 each pass: end expired leases ─▶ end dead and evicted machines ─▶ boot missing machines
 a pass follows each boot, end and grant, and each expiry or retry that is due
```
When there is no room left, an idle machine of one image is ended for a pending lease of another.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from penstock.envs.microvm.pool.image_pool import ImagePool
from penstock.envs.microvm.pool.image_pools import ImagePools
from penstock.envs.microvm.pool.lease import Leases
from penstock.envs.sandbox import Machine, SandboxError
from penstock.messages.errors import QueueFullError

log = logging.getLogger(__name__)

TICK_S_MAX = 1.0
"""Maximum seconds between passes, in case nothing wakes the loop."""
BOOT_MS_KEPT = 4096
"""Number of recent boot times from which percentiles are computed."""


class Cpus:
    """Pins each machine to the CPU with the fewest machines."""

    def __init__(self) -> None:
        self._load = dict.fromkeys(sorted(os.sched_getaffinity(0)), 0)
        self.cpu_of: dict[Machine, int] = {}
        """CPU of every machine that exists."""
        self.slots_of: dict[Machine, int] = {}
        """Number of default machines that each machine counts as."""

    async def start(
        self, start: Callable[[int], Awaitable[Machine]], num_slots: int = 1
    ) -> Machine:
        """Start a machine on the least loaded CPU."""
        cpu = min(self._load, key=self._load.__getitem__)
        # Counted before the start, or machines that boot together would all get the same CPU.
        self._load[cpu] += 1
        try:
            machine = await start(cpu)
        except BaseException:
            self._load[cpu] -= 1
            raise
        self.cpu_of[machine] = cpu
        self.slots_of[machine] = num_slots
        return machine

    def free(self, machine: Machine) -> None:
        """Record that a machine has ended."""
        self._load[self.cpu_of.pop(machine)] -= 1
        del self.slots_of[machine]


class PoolReconciler:
    """Owner of all machines of a pool.

    Args:
        pools: Image pools with idle machines and pending leases.
        leases: Granted leases.
        monotonic: Clock of leases and retries, in seconds.
        live_max: Maximum machines that exist at once, including those that boot or end.
        boots_at_once: Maximum concurrent boots.
        boot_timeout_s: Maximum seconds of one boot.

    """

    def __init__(  # noqa: PLR0913
        self,
        pools: ImagePools,
        leases: Leases,
        monotonic: Callable[[], float],
        *,
        live_max: int,
        boots_at_once: int,
        boot_timeout_s: float,
    ) -> None:
        self._pools = pools
        self._leases = leases
        self._monotonic = monotonic
        self.live_max = live_max
        self._boots_at_once = boots_at_once
        self._boot_timeout_s = boot_timeout_s
        self._cpus = Cpus()
        self._boots: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()
        self.tally: Counter[str] = Counter()
        self.boot_ms: deque[float] = deque(maxlen=BOOT_MS_KEPT)
        self._wake = asyncio.Event()
        self._passed = asyncio.Event()
        """Event that wakes all waiters after each pass; never stays set."""
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start reconciling."""
        self._loop = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop reconciling; machines keep running, and waiters for the next pass return."""
        if self._loop is not None:
            self._loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop
        self._announce_pass()

    async def next_pass(self) -> None:
        """Wait for the end of the next pass."""
        await self._passed.wait()

    async def _run(self) -> None:
        # Ends before boots: what ends makes room for what boots, at the latest in the next pass.
        while True:
            self.end_all(self._leases.end_expired())
            self.end_all(self._pools.take_useless())
            self._boot_missing()
            self._announce_pass()
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._next_pass_s()):
                    await self._wake.wait()

    def _announce_pass(self) -> None:
        self._passed.set()
        self._passed.clear()

    def _next_pass_s(self) -> float:
        now = self._monotonic()
        retries = [pool.retry_at for pool in self._pools if pool.retry_at > now]
        soonest = min(self._leases.next_expiry(), *retries, now + TICK_S_MAX)
        return max(0.001, soonest - now)  # at least 1 ms, so that overdue work cannot spin the loop

    def grant(self, pool: ImagePool) -> None:
        """Grant the idle machines of an image to its pending leases, oldest first."""
        # A machine may have died while it was idle; its lease would start with an error.
        self.end_all(pool.take_dead())
        while pool.idle and (pending := pool.pop_pending()) is not None:
            machine = pool.idle.popleft()
            lease = self._leases.grant(pending.lease_id, machine, pending.lease_s)
            pending.granted.set_result(lease)
        self._wake.set()

    @property
    def num_live(self) -> int:
        """Number of slots taken by machines that exist or boot; a default machine takes one."""
        booting = sum(pool.num_booting * pool.num_slots for pool in self._pools)
        return booting + sum(self._cpus.slots_of.values())

    def _boot_missing(self) -> None:
        """Boot machines for pending leases, then those to keep ready; make room for the former."""
        now = self._monotonic()
        pools = [pool for pool in self._pools if now >= pool.retry_at and not pool.is_absent]
        # The image whose lease has waited longest comes first, so that none starves.
        pools.sort(key=lambda pool: pool.pending_since)
        for pool in pools:
            self._boot_some(pool, pool.num_unmet)
        for pool in pools:
            self._boot_some(pool, pool.num_missing)
        unmet = [pool for pool in pools if pool.num_unmet]
        # Machines that are ending already count as room, or too many idle ones would be ended.
        if unmet and self.num_live - len(self._ends) + unmet[0].num_slots > self.live_max:
            num_slots = sum(pool.num_unmet * pool.num_slots for pool in unmet)
            self.end_all(self._pools.take_idle(num_slots))

    def _boot_some(self, pool: ImagePool, num_machines: int) -> None:
        num_room = (self.live_max - self.num_live) // pool.num_slots
        num_booting = sum(image_pool.num_booting for image_pool in self._pools)
        room = min(num_room, self._boots_at_once - num_booting)
        for _ in range(min(num_machines, room)):
            pool.num_booting += 1
            _spawn(self._boot(pool), self._boots)

    async def _boot(self, pool: ImagePool) -> None:
        async def start(cpu: int) -> Machine:
            return await pool.backend.start(cpu=cpu, timeout_s=self._boot_timeout_s)

        try:
            machine = await self._cpus.start(start, pool.num_slots)
        except SandboxError as error:
            self.tally["boot_failures"] += 1
            pool.boot_failed(error, self._monotonic())
        else:
            self.tally["booted"] += 1
            self.boot_ms.append(machine.info.boot_ms)
            pool.booted(machine)
        finally:
            # After the machine is idle or has failed, so that the count never dips in between.
            pool.num_booting -= 1
            self.grant(pool)

    def make_room(self, num_slots: int) -> list[Machine]:
        """Return idle machines that the caller must end for a new machine to fit in `live_max`.

        Raises:
            QueueFullError: Too few machines are idle; the idle ones are ended anyway.

        """
        taken = list[Machine]()
        if self.num_live + num_slots <= self.live_max:
            return taken
        while num_slots > 0 and (idle := self._pools.take_idle(1)):
            num_slots -= self._cpus.slots_of.get(idle[0], 1)
            taken += idle
        if num_slots <= 0:
            return taken
        self.end_all(taken)
        raise QueueFullError(f"sandbox pool: {self.live_max} machines exist already")

    async def start_machine(
        self, pool: ImagePool, start: Callable[[int], Awaitable[Machine]]
    ) -> Machine:
        """Start a machine that is leased immediately and never idle.

        Args:
            pool: Pool of its image, in which the caller has counted the machine as booting.
            start: Function that starts the machine on a CPU.

        Raises:
            SandboxError: The machine did not start.

        """
        try:
            return await self._cpus.start(start, pool.num_slots)
        finally:
            pool.num_booting -= 1
            self._wake.set()

    def end_all(self, machines: Iterable[Machine]) -> None:
        """End machines in the background."""
        for machine in machines:
            _spawn(self.end(machine), self._ends)

    async def end(self, machine: Machine) -> None:
        """End a machine; a repeated call does nothing."""
        if machine not in self._cpus.cpu_of:
            return
        # Before closing it, after which every machine is dead.
        self.tally["deaths"] += not machine.alive
        try:
            await machine.close()
        except SandboxError:
            log.exception("machine not ended; its memory may stay in use")
            self.tally["close_failures"] += 1
        finally:
            self._cpus.free(machine)
            self._wake.set()

    async def close(self, give_up_at: float, starts: Iterable[asyncio.Task[Any]]) -> int:
        """Cancel starting machines, end all others, and return how many were not done in time.

        Args:
            give_up_at: Deadline by `time.monotonic`, in seconds.
            starts: Tasks other than boots that start machines.

        """
        starting = {*self._boots, *starts}
        for start in starting:
            start.cancel()
        # Starts first: one that had just succeeded when it was cancelled leaves a machine to end.
        late = await _wait_until(give_up_at, {*starting, *self._ends})
        self.end_all(list(self._cpus.cpu_of))
        late |= await _wait_until(give_up_at, set(self._ends))
        return len(late)


def _spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    # The event loop keeps only weak references to tasks: without the set they could vanish.
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _wait_until(give_up_at: float, tasks: set[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """Wait for tasks; cancel and return those still running at a time of `time.monotonic`."""
    if not tasks:
        return set()
    _, late = await asyncio.wait(tasks, timeout=max(0.0, give_up_at - time.monotonic()))
    for task in late:
        task.cancel()
    return late
