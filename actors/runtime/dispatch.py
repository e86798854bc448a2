"""From an event to its handler, found once and for all when the actor is hosted."""

import re
from collections.abc import Coroutine
from typing import Any, Protocol, cast

from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.messages.base import Event
from penstock.messages.errors import ConfigError


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
