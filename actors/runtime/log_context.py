"""Names the actor that a log line comes from, without each call passing it.

Several actors share a process. Each host enters its actor's name before it starts any task; tasks
copy the context they are created in, and `HostContext.offload` carries it into the worker thread.
"""

import logging
from contextvars import ContextVar

_actor: ContextVar[str] = ContextVar("actor", default="-")


def enter_actor(name: str) -> None:
    """Attribute the log lines of this task, and of tasks it creates, to an actor."""
    _actor.set(name)


class ActorFilter(logging.Filter):
    """Sets `actor` on every record; "-" outside actors."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the name and keep the record."""
        record.actor = _actor.get()
        return True
