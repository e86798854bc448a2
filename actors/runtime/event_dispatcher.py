"""Handlers and their effects: run the one, publish the other, set bad events aside."""

import logging
from collections.abc import Coroutine
from typing import Any

from penstock.actors.runtime.actor import Effects
from penstock.actors.runtime.dispatch import Handler
from penstock.actors.runtime.host_context import HostContext
from penstock.messages.base import Event
from penstock.messages.bus import Bus, Delivery
from penstock.messages.codec import encode
from penstock.messages.control import MessageRejected
from penstock.messages.errors import PenstockError

log = logging.getLogger(__name__)


class Applier:
    """Runs the handlers of one actor."""

    def __init__(self, ctx: HostContext, bus: Bus, handlers: dict[type[Event], Handler]) -> None:
        self._ctx = ctx
        self._bus = bus
        self._handlers = handlers
        self.num_handled = 0

    async def apply(self, handling: Coroutine[Any, Any, Effects]) -> None:
        """Run to the end, counted as busy, then publish the effects durably."""
        effects = await self._ctx.meter.run(handling)
        if effects:
            await self._bus.publish(effects)

    async def handle(self, delivery: Delivery) -> bool:
        """Handle one event; False where it was invalid and is on the dead-letter stream."""
        handler = self._handlers[type(delivery.event)]
        try:
            await self.apply(handler(delivery.event, self._ctx))
        except PenstockError as error:
            if not isinstance(error, ValueError):
                raise
            await self.reject(delivery, f"{type(error).__name__}: {error}")
            return False
        self.num_handled += 1
        return True

    async def reject(self, delivery: Delivery, cause: str) -> None:
        """Keep an event that cannot be handled, with its cause."""
        log.error("%s rejects %s: %s", self._ctx.actor, delivery.subject, cause)
        rejected = MessageRejected(
            source_stream=delivery.stream,
            source_sequence=delivery.sequence,
            source_subject=delivery.subject,
            actor=self._ctx.actor,
            cause=cause,
            data=encode(delivery.event),
        )
        await self._bus.publish([rejected])
