"""The interface of task readers: entries are read one by one, so a malformed one stops no other."""

from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from penstock.envs.tasks.source import TaskCandidate


class TaskEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a source, not yet read."""

    name: str
    """Name of its folder, or its id."""
    read: Callable[[], TaskCandidate]
    """Function that reads the task; raises MalformedTaskError."""


class TaskCollection(Protocol):
    """The tasks of one format at one place."""

    format: str
    """Name of the format, for reports."""

    def entries(self) -> Iterator[TaskEntry]:
        """Yield the tasks, by name.

        Raises:
            MalformedTaskError: The place as a whole cannot be read.

        """
        ...
