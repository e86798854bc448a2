"""Which task each group attempts: a function of the seed and the group's index alone."""

import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from penstock.messages.errors import ConfigError, PenstockError
from penstock.messages.task import Task

DRAWS_MAX = 1000


class TasksExhaustedError(PenstockError, RuntimeError):
    """There is no training task left to attempt."""


class Curriculum:
    """Draws a category by its weight, then one of the category's tasks."""

    def __init__(self, seed: int, tasks: Sequence[Task], weights: Mapping[str, float]) -> None:
        """Sort tasks by category.

        Raises:
            ConfigError: A weight for a category that has no task, or no task with a weight.

        """
        self._seed = seed
        self._tasks: dict[str, list[Task]] = defaultdict(list)
        for task in tasks:
            self._tasks[task.category].append(task)
        unknown = sorted(set(weights) - set(self._tasks))
        if unknown:
            known = ", ".join(sorted(self._tasks))
            raise ConfigError(
                f"pacer.category_weights: unknown categories {unknown}; there are: {known}"
            )
        self._weights = dict(weights) or dict.fromkeys(sorted(self._tasks), 1.0)
        if sum(self._weights.values()) <= 0:
            raise ConfigError("pacer.category_weights: expected a task and a weight above 0")

    def pick(self, group_index: int, without: Collection[str] = ()) -> Task:
        """Return the task of a group: the first that it draws of those that may be attempted.

        Raises:
            TasksExhaustedError: Every task of the drawn categories is to be left out.

        """
        generator = random.Random(f"curriculum.{self._seed}.{group_index}")
        categories = sorted(self._weights)
        weights = [self._weights[category] for category in categories]
        for _ in range(DRAWS_MAX):
            category = generator.choices(categories, weights)[0]
            task = generator.choice(self._tasks[category])
            if task.task_id not in without:
                return task
        raise TasksExhaustedError(
            f"group {group_index}: {DRAWS_MAX} tasks drawn, and all are quarantined"
        )
