"""Event dispatch: calls an event's handler, publishes its effects, quarantines events that fail."""

import contextlib
import logging
import re
from collections.abc import Coroutine
from typing import Any, Protocol, cast

from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.actors.runtime.host_context import HostContext
from penstock.actors.runtime.in_progress import InProgress, event_item, task_of
from penstock.messages.base import Event
from penstock.messages.bus import Bus, Delivery
from penstock.messages.codec import encode
from penstock.messages.control import ItemCharged, ItemQuarantined, MessageRejected
from penstock.messages.errors import ConfigError, PenstockError, RemoteCallError

log = logging.getLogger(__name__)


class Handler(Protocol):
    """An `on_<event>` method of an actor."""

    def __call__(self, event: Event, ctx: Context, /) -> Coroutine[Any, Any, Effects]:
        """Handle one event."""
        ...


def handler_name(event_type: type[Event]) -> str:
    """Return the name of an event's handler, e.g. `on_rollout_finished` for RolloutFinished."""
    return "on_" + re.sub(r"(?<!^)(?=[A-Z])", "_", event_type.__name__).lower()


def find_handlers(actor: Actor) -> dict[type[Event], Handler]:
    """Return the handler of every event type that `actor` follows or consumes.

    Raises:
        ConfigError: A handler is missing, or the consumed types belong to several streams.

    """
    handlers: dict[type[Event], Handler] = {}
    for event_type in (*actor.follows, *actor.consumes):
        handler = getattr(actor, handler_name(event_type), getattr(actor, "on_any", None))
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


ATTEMPTS = 2
"""Maximum times that a handler may raise on one event before the event is quarantined."""
_OUTSIDE_ERRORS = (OSError, RemoteCallError)
"""Errors of the bus, store, network, disk or a deadline; never the fault of the event."""


class FoldStuckError(PenstockError, RuntimeError):
    """An actor that may not skip an event failed on it, restarted, and failed on it again."""


class EventDispatcher:
    """Runs the handlers of one actor.

    An event whose handler raises `ATTEMPTS` times is quarantined, and the actor continues. An actor
    whose state would be wrong without the event (`Actor.can_skip` is False) fails instead; the
    second failure on the same event ends the run.
    """

    def __init__(
        self,
        actor: Actor,
        ctx: HostContext,
        bus: Bus,
        in_progress: InProgress,
    ) -> None:
        self._role, self._can_skip = actor.role, actor.can_skip
        self._ctx = ctx
        self._bus = bus
        self._in_progress = in_progress
        self._handlers = find_handlers(actor)
        self.num_handled = 0

    async def apply(self, handling: Coroutine[Any, Any, Effects]) -> None:
        """Await a handler, counted as busy time, then publish its effects durably."""
        effects = await self._ctx.meter.run(handling)
        if effects:
            await self._bus.publish(effects)

    async def handle(self, delivery: Delivery) -> bool:
        """Handle one event; return False if it went to the dead-letter stream instead.

        Events that were in progress when a process died are handled one at a time.
        """
        item, task_id = event_item(self._role, delivery.event), task_of(delivery.event)
        async with contextlib.AsyncExitStack() as stack:
            # Only a redelivered event can be charged; the common case saves two reads of the bus.
            if delivery.num_delivered > 1:
                if cause := await self._quarantined(item):
                    await self.reject(delivery, cause, is_charged=True)
                    return False
                if await self._bus.last(ItemCharged, f"{item}.1") is not None:
                    # One suspect at a time: another death then proves which event causes it.
                    log.warning("handling %s alone, it was charged with a death", item)
                    kind = type(delivery.event).__name__
                    await stack.enter_async_context(self._in_progress.alone(kind))
            stack.enter_context(self._in_progress.noted(item, task_id))
            return await self._attempt(delivery, item, task_id)

    async def _attempt(self, delivery: Delivery, item: str, task_id: str) -> bool:
        handler, cause = self._handlers[type(delivery.event)], ""
        for _ in range(ATTEMPTS):
            try:
                self._ctx.stored_at = delivery.stored_at
                await self.apply(handler(delivery.event, self._ctx))
            except _OUTSIDE_ERRORS:
                raise
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                # Our own value errors depend on the event alone: another attempt fails as well.
                if isinstance(error, PenstockError) and isinstance(error, ValueError):
                    await self.reject(delivery, cause, is_charged=True)
                    return False
                if not self._can_skip:
                    await self._charge(item, task_id, cause)
                    raise
                log.exception("handler of %s failed", delivery.subject)
            else:
                self.num_handled += 1
                return True
        quarantined = ItemQuarantined(item=item, cause=cause, task_id=task_id)
        await self._bus.publish([quarantined])
        await self.reject(delivery, cause, is_charged=True)
        return False

    async def _charge(self, item: str, task_id: str, cause: str) -> None:
        """Charge an event that this actor may not skip.

        Raises:
            FoldStuckError: The event was charged before.

        """
        is_second = await self._bus.last(ItemCharged, f"{item}.1") is not None
        charged = ItemCharged(
            item=item, number=1 + is_second, cause=cause, is_proven=True, task_id=task_id
        )
        await self._bus.publish([charged])
        # The launcher charges what a dead process had in progress; this failure is charged already.
        self._in_progress.has_charged = True
        if is_second:
            await self._bus.publish([ItemQuarantined(item=item, cause=cause, task_id=task_id)])
            raise FoldStuckError(
                f"{self._ctx.actor} failed twice on {item}, which it may not skip: {cause}"
            )

    async def _quarantined(self, item: str) -> str:
        """Return why an item is in quarantine; empty if it is not."""
        found = await self._bus.last(ItemQuarantined, item)
        if found is None:
            return ""
        assert isinstance(found.event, ItemQuarantined)
        return f"quarantined: {found.event.cause}"

    async def reject(self, delivery: Delivery, cause: str, *, is_charged: bool) -> None:
        """Publish an event that cannot be handled to the dead-letter stream, with its cause."""
        log.error("rejecting %s, sequence %d: %s", delivery.subject, delivery.sequence, cause)
        rejected = MessageRejected(
            source_stream=delivery.stream,
            source_sequence=delivery.sequence,
            source_subject=delivery.subject,
            actor=self._ctx.actor,
            cause=cause,
            data=encode(delivery.event),
            is_charged=is_charged,
        )
        await self._bus.publish([rejected])
