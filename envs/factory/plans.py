"""What a source of tasks is: plans, each of which is drafted in the lab's machines."""

from collections.abc import Iterator
from typing import Protocol

from penstock.envs.factory.lab import MachineLab
from penstock.envs.tasks.source import TaskCandidate


class TaskPlan(Protocol):
    """Something that may become tasks; cheap until it is drafted."""

    name: str

    async def draft(self, lab: MachineLab) -> list[TaskCandidate]:
        """Make candidates.

        Raises:
            TaskRejectedError: Nothing can be made of it.

        """
        ...


class TaskSource(Protocol):
    """Where tasks come from."""

    name: str

    def plans(self) -> Iterator[TaskPlan]:
        """Yield plans in an order that the source's seed decides."""
        ...
