"""What goes on in a pool by itself: late leases end, what is missing boots, who waits is served."""

import asyncio
import contextlib
from collections.abc import Callable

from penstock.envs.microvm.pool.image_pool import Stock
from penstock.envs.microvm.pool.image_pools import Stocks
from penstock.envs.microvm.pool.lease import Leases
from penstock.envs.microvm.pool.machines import Machines

TICK_S_MAX = 1.0


class Keeper:
    """Keeps a pool, from `start` to `stop`.

    Args:
        stocks: Idle machines, and who waits for one.
        leases: Of the pool.
        monotonic: The time that leases run by.
        live_max: Bound on all machines.
        boots_at_once: Bound on concurrent boots.
        boot_timeout_s: Deadline of one boot.

    """

    def __init__(  # noqa: PLR0913
        self,
        stocks: Stocks,
        leases: Leases,
        monotonic: Callable[[], float],
        *,
        live_max: int,
        boots_at_once: int,
        boot_timeout_s: float,
    ) -> None:
        self._stocks = stocks
        self._leases = leases
        self._monotonic = monotonic
        self.machines = Machines(
            stocks,
            live_max=live_max,
            boots_at_once=boots_at_once,
            boot_timeout_s=boot_timeout_s,
            on_change=self._changed,
            monotonic=monotonic,
        )
        self._wake = asyncio.Event()
        self._looked = asyncio.Event()
        """Set for a moment, after each look."""
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._keeping = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End; whoever waits for a look has it."""
        if self._keeping is not None:
            self._keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeping
        self._tell()

    async def look(self) -> None:
        """Wait for the next look at what the pool holds."""
        await self._looked.wait()

    async def _keep(self) -> None:
        while True:
            self.machines.end_all(self._leases.end_late())
            self.machines.end_all(self._stocks.take_useless())
            self.machines.boot_missing()
            self._tell()
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._tick_s()):
                    await self._wake.wait()

    def _tell(self) -> None:
        self._looked.set()
        self._looked.clear()

    def _tick_s(self) -> float:
        now = self._monotonic()
        retries = [stock.retry_at for stock in self._stocks if stock.retry_at > now]
        soonest = min(self._leases.expire_from(), *retries, now + TICK_S_MAX)
        return max(0.001, soonest - now)

    def _changed(self, stock: Stock | None) -> None:
        """Lend a new machine; look again at what is missing."""
        if stock is not None:
            self.hand_out(stock)
        self._wake.set()

    def hand_out(self, stock: Stock) -> None:
        """Lend the machines of a stock that are ready to those who wait, the oldest first."""
        self.machines.end_all(stock.take_dead())
        while stock.idle and (want := stock.take_want()) is not None:
            machine = stock.idle.popleft()
            want.given.set_result(self._leases.lend(want.lease_id, machine, want.lease_s))
        self._wake.set()
