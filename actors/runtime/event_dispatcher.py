"""Event dispatch: from an event to its handler, its effects published, bad events set aside."""

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


ATTEMPTS = 2
"""How often a handler may raise on one event before the event is set aside."""
_OUTSIDE = (OSError, RemoteCallError)
"""The outside's failure (bus, store, network, disk, deadlines), never the event's."""


class FoldStuckError(PenstockError, RuntimeError):
    """An actor that must not leave out an event failed at it, started again, and failed again."""


class EventDispatcher:
    """Runs the handlers of one actor.

    An event whose handler raises is set aside after `ATTEMPTS`, and the actor goes on: the failure
    is the event's alone. Only an actor whose state would be wrong without it (`Actor.can_skip`)
    fails; the second time for good.
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
        """Run to the end, counted as busy, then publish the effects durably."""
        effects = await self._ctx.meter.run(handling)
        if effects:
            await self._bus.publish(effects)

    async def handle(self, delivery: Delivery) -> bool:
        """Handle one event; False where it is on the dead-letter stream instead.

        One that was in progress when a process died is handled while no other such event is.
        """
        item, task_id = event_item(self._role, delivery.event), task_of(delivery.event)
        async with contextlib.AsyncExitStack() as stack:
            if delivery.num_delivered > 1:
                if cause := await self._quarantined(item):
                    await self.reject(delivery, cause, is_charged=True)
                    return False
                if await self._bus.last(ItemCharged, f"{item}.1") is not None:
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
            except _OUTSIDE:
                raise
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                if isinstance(error, PenstockError) and isinstance(error, ValueError):
                    await self.reject(delivery, cause, is_charged=True)
                    return False
                if not self._can_skip:
                    await self._charge(item, task_id, cause)
                    raise
                log.exception("%s fails at %s", self._ctx.actor, delivery.subject)
            else:
                self.num_handled += 1
                return True
        quarantined = ItemQuarantined(item=item, cause=cause, task_id=task_id)
        await self._bus.publish([quarantined])
        await self.reject(delivery, cause, is_charged=True)
        return False

    async def _charge(self, item: str, task_id: str, cause: str) -> None:
        """Charge an event that this actor cannot leave out.

        Raises:
            FoldStuckError: It was charged before.

        """
        is_second = await self._bus.last(ItemCharged, f"{item}.1") is not None
        charged = ItemCharged(
            item=item, number=1 + is_second, cause=cause, is_proven=True, task_id=task_id
        )
        await self._bus.publish([charged])
        self._in_progress.has_charged = True
        if is_second:
            await self._bus.publish([ItemQuarantined(item=item, cause=cause, task_id=task_id)])
            raise FoldStuckError(
                f"{self._ctx.actor} cannot get past {item}, and cannot leave it out: {cause}"
            )

    async def _quarantined(self, item: str) -> str:
        """Return why an item is quarantined; empty if it is not."""
        found = await self._bus.last(ItemQuarantined, item)
        if found is None:
            return ""
        assert isinstance(found.event, ItemQuarantined)
        return f"quarantined: {found.event.cause}"

    async def reject(self, delivery: Delivery, cause: str, *, is_charged: bool) -> None:
        """Keep an event that cannot be handled, with its cause."""
        log.error("%s rejects %s: %s", self._ctx.actor, delivery.subject, cause)
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
