"""Event dispatch: from an event to its handler, its effects published, bad events set aside."""

import logging
import re
from collections.abc import Coroutine
from typing import Any, Protocol, cast

from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.actors.runtime.host_context import HostContext
from penstock.messages.base import Event
from penstock.messages.bus import Bus, Delivery
from penstock.messages.codec import encode
from penstock.messages.control import MessageRejected
from penstock.messages.errors import ConfigError, PenstockError

log = logging.getLogger(__name__)


class Handler(Protocol):
    """An actor's `on_<event>`."""

    def __call__(self, event: Event, ctx: Context, /) -> Coroutine[Any, Any, Effects]:
        """Handle one event."""
        ...


def handler_name(event_type: type[Event]) -> str:
    """Return e.g. `on_rollout_finished` for RolloutFinished."""
    return "on_" + re.sub(r"(?<!^)(?=[A-Z])", "_", event_type.__name__).lower()


def find_handlers(actor: Actor) -> dict[type[Event], Handler]:
    """Return the handler of every type that `actor` follows or consumes.

    Raises:
        ConfigError: A handler is missing, or what is consumed is not of one stream.

    """
    handlers: dict[type[Event], Handler] = {}
    for event_type in (*actor.follows, *actor.consumes):
        handler = getattr(actor, handler_name(event_type), None)
        if handler is None:
            raise ConfigError(
                f"{type(actor).__name__}: expected a method {handler_name(event_type)} "
                f"for {event_type.__name__}"
            )
        handlers[event_type] = cast(Handler, handler)
    streams = sorted({kind.stream for kind in actor.consumes})
    if len(streams) > 1:
        raise ConfigError(f"{type(actor).__name__}.consumes: expected one stream, got {streams}")
    return handlers


class EventDispatcher:
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
