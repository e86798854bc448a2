"""All machines of a pool: booted where one is missing, ended, and never more than `live_max`.

Where all room is taken, an idle machine of another image makes room for whom somebody waits.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from penstock.envs.microvm.pool.cpus import Cpus
from penstock.envs.microvm.pool.image_pool import Stock
from penstock.envs.microvm.pool.image_pools import Stocks
from penstock.envs.sandbox import Machine, SandboxError
from penstock.messages.errors import QueueFullError

BOOT_MS_KEPT = 4096

Start = Callable[[int], Awaitable[Machine]]
"""Starts a machine on a processor."""


class Machines:
    """Boots for the stocks.

    Args:
        stocks: What is missing, and where ready machines go.
        live_max: Bound on all machines that exist, booting and ending ones included.
        boots_at_once: Bound on concurrent boots.
        boot_timeout_s: Deadline of one boot.
        on_change: Told after each boot and end: the stock with a new machine, or None.
        monotonic: The time that pauses after failures run by.

    """

    def __init__(  # noqa: PLR0913
        self,
        stocks: Stocks,
        *,
        live_max: int,
        boots_at_once: int,
        boot_timeout_s: float,
        on_change: Callable[[Stock | None], None],
        monotonic: Callable[[], float],
    ) -> None:
        self._stocks = stocks
        self.live_max = live_max
        self._boots_at_once = boots_at_once
        self._boot_timeout_s = boot_timeout_s
        self._on_change = on_change
        self._monotonic = monotonic
        self._cpus = Cpus()
        """Of every machine that exists."""
        self._boots: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()
        self.tally: Counter[str] = Counter()
        self.boot_ms: deque[float] = deque(maxlen=BOOT_MS_KEPT)

    @property
    def num_live(self) -> int:
        """Machines that exist or start."""
        return self._num_booting + len(self._cpus)

    @property
    def _num_booting(self) -> int:
        return sum(stock.num_booting for stock in self._stocks)

    def boot_missing(self) -> None:
        """Boot whom somebody waits for, then those to keep ready; make room for the first."""
        now = self._monotonic()
        stocks = [s for s in self._stocks if now >= s.retry_at and not s.is_absent]
        stocks.sort(key=lambda stock: stock.waits_since)
        for stock in stocks:
            self._boot_some(stock, stock.num_unmet)
        for stock in stocks:
            self._boot_some(stock, stock.num_missing)
        if self.num_live - len(self._ends) >= self.live_max:
            self.end_all(self._stocks.take_idle(sum(stock.num_unmet for stock in stocks)))

    def _boot_some(self, stock: Stock, num_wanted: int) -> None:
        room = min(self.live_max - self.num_live, self._boots_at_once - self._num_booting)
        for _ in range(min(num_wanted, room)):
            stock.num_booting += 1
            _spawn(self._boot(stock), self._boots)

    async def _boot(self, stock: Stock) -> None:
        try:
            with self._cpus.starting() as cpu:
                machine = await stock.backend.start(cpu=cpu, timeout_s=self._boot_timeout_s)
        except SandboxError as error:
            self.tally["boot_failures"] += 1
            stock.boot_failed(error, self._monotonic())
        else:
            self._cpus.take(machine, cpu)
            self.tally["booted"] += 1
            self.boot_ms.append(machine.info.boot_ms)
            stock.booted(machine)
        finally:
            stock.num_booting -= 1
            self._on_change(stock)

    def make_room(self) -> list[Machine]:
        """Take an idle machine, for the caller to end, where one more would be too many.

        Raises:
            QueueFullError: None is idle.

        """
        if self.num_live < self.live_max:
            return []
        if taken := self._stocks.take_idle(1):
            return taken
        raise QueueFullError(f"sandbox pool: {self.live_max} machines exist already")

    async def start(self, stock: Stock, start: Start) -> Machine:
        """Start a machine of an image that is lent at once.

        Args:
            stock: Of the image; the caller has counted the machine as booting, so that there is
                room for it.
            start: Starts it.

        Raises:
            SandboxError: It did not come up.

        """
        try:
            with self._cpus.starting() as cpu:
                machine = await start(cpu)
            self._cpus.take(machine, cpu)
        finally:
            stock.num_booting -= 1
            self._on_change(None)
        return machine

    def end_all(self, machines: Iterable[Machine]) -> None:
        """End machines in the background."""
        for machine in machines:
            _spawn(self.end(machine), self._ends)

    async def end(self, machine: Machine) -> None:
        """End a machine; twice does nothing."""
        if machine not in self._cpus:
            return
        self.tally["deaths"] += not machine.alive
        try:
            await machine.close()
        except SandboxError:
            self.tally["close_failures"] += 1
        finally:
            self._cpus.free(machine)
            self._on_change(None)

    async def close(self, give_up_at: float, starts: Iterable[asyncio.Task[Any]]) -> int:
        """Cancel what starts, then end all; return how many had not ended in time.

        Args:
            give_up_at: Of `time.monotonic`.
            starts: What starts besides boots.

        """
        starting = {*self._boots, *starts}
        for start in starting:
            start.cancel()
        late = await _wait_until(give_up_at, {*starting, *self._ends})
        self.end_all(self._cpus.machines())
        late |= await _wait_until(give_up_at, set(self._ends))
        return len(late)


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
