"""Selects tasks of a split by source and category."""

from collections.abc import Collection, Sequence

from penstock.messages.task import Task


def eligible_tasks(
    tasks: Sequence[Task], sources: Collection[str], categories: Collection[str]
) -> list[Task]:
    """Return the tasks of some sources and categories (empty for all), sorted by category."""
    chosen = [
        task
        for task in tasks
        if (not sources or task.source in sources)
        and (not categories or task.category in categories)
    ]
    return sorted(chosen, key=lambda task: task.category)
