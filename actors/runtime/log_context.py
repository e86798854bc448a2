"""Adds the name of the current actor to every log line.

Several actors share a process. Each host sets its actor's name before it starts any task. Tasks
copy the context in which they are created, and `HostContext.offload` copies it to the worker
thread.
"""

import logging
from contextvars import ContextVar

_actor: ContextVar[str] = ContextVar("actor", default="-")


def enter_actor(name: str) -> None:
    """Attribute the log lines of this task, and of tasks that it creates, to an actor."""
    _actor.set(name)


class ActorFilter(logging.Filter):
    """Filter that sets `actor` on every record; "-" outside of actors."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the actor's name and keep the record."""
        record.actor = _actor.get()
        return True
