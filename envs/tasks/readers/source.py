"""What a reader of tasks gives: entries, read one by one, so that none stops the others."""

from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from penstock.envs.tasks.source import TaskCandidate


class TaskEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a source, not yet read."""

    name: str
    """Name of its folder, or its id."""
    read: Callable[[], TaskCandidate]
    """Raises MalformedTaskError."""


class TaskCollection(Protocol):
    """Tasks of one format at one place."""

    format: str
    """Name of the format, for reports."""

    def entries(self) -> Iterator[TaskEntry]:
        """Yield the tasks, by name.

        Raises:
            MalformedTaskError: The place as a whole cannot be read.

        """
        ...
