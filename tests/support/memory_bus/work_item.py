"""A delivery of the bus in memory, and its settlement."""

from collections.abc import Callable

from tests.support.memory_bus.server import MemoryServer
from tests.support.memory_bus.work import MemoryDurable

from penstock.messages.bus import Delivery


class MemoryWorkItem:
    """One delivery, to be settled once; settling again does nothing."""

    def __init__(
        self,
        delivery: Delivery,
        server: MemoryServer,
        durable: MemoryDurable,
        *,
        ack_wait_s: float,
        on_settled: Callable[[], bool],
    ) -> None:
        self._delivery = delivery
        self._server = server
        self._durable = durable
        self._ack_wait_s = ack_wait_s
        self._on_settled = on_settled
        self._is_settled = False

    @property
    def delivery(self) -> Delivery:
        """What was delivered."""
        return self._delivery

    async def ack(self) -> None:
        """Done."""
        if self._settle():
            self._durable.ack(self._delivery.sequence)
            self._server.notify()

    async def nak(self, delay_s: float = 0.0) -> None:
        """Deliver again after `delay_s`."""
        if self._settle():
            self._durable.again(self._delivery.sequence, self._server.clock.now() + delay_s)
            self._server.notify()

    async def in_progress(self) -> None:
        """Reset the redelivery timer."""
        until = self._server.clock.now() + self._ack_wait_s
        self._durable.extend(self._delivery.sequence, until)

    async def term(self) -> None:
        """Never deliver again."""
        await self.ack()

    def _settle(self) -> bool:
        """Return whether the settlement arrives."""
        if self._is_settled:
            return False
        self._is_settled = True
        return self._on_settled() and not self._server.happens(self._server.faults.lose_ack)
