"""The protocols of task sources and their plans."""

from collections.abc import Iterator
from typing import Protocol

from penstock.envs.factory.lab import MachineLab
from penstock.envs.tasks.source import TaskCandidate


class TaskPlan(Protocol):
    """A candidate for tasks that is cheap until it is drafted."""

    name: str

    async def draft(self, lab: MachineLab) -> list[TaskCandidate]:
        """Draft candidates.

        Raises:
            TaskRejectedError: The plan yields no task.

        """
        ...


class TaskSource(Protocol):
    """A source of tasks."""

    name: str

    def plans(self) -> Iterator[TaskPlan]:
        """Yield plans in an order that depends on the source's seed."""
        ...
