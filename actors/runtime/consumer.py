"""Consumption of shared work: handles several events at once and acks each after its effects."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing

from penstock.actors.runtime.background_tasks import Tasks
from penstock.actors.runtime.event_dispatcher import EventDispatcher
from penstock.messages.base import Event
from penstock.messages.bus import Bus, WorkItem
from penstock.messages.errors import RemoteCallError

log = logging.getLogger(__name__)

ACK_WAIT_S = 15.0
"""Time after the last heartbeat at which the bus redelivers the events of a killed worker."""
# A third of the wait: two heartbeats may get lost before the bus redelivers.
HEARTBEAT_S = ACK_WAIT_S / 3
RETRY_S = 1.0
"""Delay before an event that failed for an outside reason is redelivered."""
OUTSIDE_ERRORS = (TimeoutError, ConnectionError, BlockingIOError, RemoteCallError)
"""Errors caused by neither the event nor the actor: the event is redelivered to any actor of the
role."""


class Consumer:
    """The consumed events of one actor.

    The bus delivers at most `num_concurrent` unacknowledged events. Each gets a handler
    immediately, so the set of running handlers is the mailbox.
    """

    def __init__(self, name: str, bus: Bus, dispatcher: EventDispatcher) -> None:
        self._name = name
        self._bus = bus
        self._dispatcher = dispatcher
        self._intake = Tasks()
        self._running = Tasks()
        self.failures = (self._intake.failed, self._running.failed)

    def __len__(self) -> int:
        return len(self._running)

    def start(self, durable: str, types: Sequence[type[Event]], num_concurrent: int) -> None:
        """Start to take work in the background."""
        self._intake.start(f"{self._name}: consume", self._take(durable, types, num_concurrent))

    async def drain(self, within_s: float) -> None:
        """Stop taking work, let running handlers end, and return unfinished events to the bus."""
        # Intake first: a handler that ends would otherwise make room for the next event.
        await self._intake.cancel()
        if not await self._running.settled(within_s):
            log.warning(
                "%d events unfinished after %g s, returned to the bus", len(self._running), within_s
            )
        await self._running.cancel()

    async def close(self) -> None:
        """Return everything to the bus immediately."""
        await self.drain(0.0)
        self._intake.close()
        self._running.close()

    async def _take(self, durable: str, types: Sequence[type[Event]], num_concurrent: int) -> None:
        items = self._bus.consume(
            durable, types, num_pending_max=num_concurrent, ack_wait_s=ACK_WAIT_S
        )
        async with aclosing(items):
            async for item in items:
                self._running.start(f"{self._name}: {item.delivery.subject}", self._work(item))

    async def _work(self, item: WorkItem) -> None:
        heartbeat = asyncio.create_task(_send_heartbeats(item))
        try:
            if await self._dispatcher.handle(item.delivery):
                await item.ack()
            else:
                await item.term()
        except OUTSIDE_ERRORS as error:
            log.warning("retrying %s in %g s: %s", item.delivery.subject, RETRY_S, error)
            await item.nak(RETRY_S)
        except asyncio.CancelledError:
            # Return it now: another worker should not wait for ACK_WAIT_S.
            await item.nak()
            raise
        finally:
            heartbeat.cancel()


async def _send_heartbeats(item: WorkItem) -> None:
    """Report to the bus periodically that the event is still being handled."""
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        await item.in_progress()
