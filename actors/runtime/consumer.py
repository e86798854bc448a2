"""Shared work: several events handled at once, each settled after its effects are stored."""

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
"""Events of a killed worker are delivered again this long after its last heartbeat."""
HEARTBEAT_S = ACK_WAIT_S / 3
RETRY_S = 1.0
OUTSIDE_ERRORS = (TimeoutError, ConnectionError, BlockingIOError, RemoteCallError)
"""Not the event's fault nor the actor's: the event is delivered again, to anyone."""


class Consumer:
    """The consumed events of one actor.

    The bus delivers at most `num_concurrent` unsettled events: every one has its handler at once,
    so the mailbox is the set of running handlers.
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
        """Take work in the background."""
        self._intake.start(f"{self._name}: consume", self._take(durable, types, num_concurrent))

    async def drain(self, within_s: float) -> None:
        """Take no more; let running handlers end; return what does not end in time to the bus."""
        await self._intake.cancel()
        if not await self._running.settled(within_s):
            log.warning("%s: %d events returned unfinished", self._name, len(self._running))
        await self._running.cancel()

    async def close(self) -> None:
        """Return everything to the bus at once."""
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
        heartbeat = asyncio.create_task(_keep(item))
        try:
            if await self._dispatcher.handle(item.delivery):
                await item.ack()
            else:
                await item.term()
        except OUTSIDE_ERRORS as error:
            log.warning("%s: %s again: %s", self._name, item.delivery.subject, error)
            await item.nak(RETRY_S)
        except asyncio.CancelledError:
            await item.nak()
            raise
        finally:
            heartbeat.cancel()


async def _keep(item: WorkItem) -> None:
    """Report to the bus that the event is still in work."""
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        await item.in_progress()
