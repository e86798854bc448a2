"""Tasks with their hidden tests, as the judge loads them."""

import msgspec

from penstock.envs.tasks.storage import load_hidden_tests, load_tasks
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import NotFoundError
from penstock.messages.task import HiddenTests, Purpose, Split, Task

_SPLITS = {Purpose.TRAIN: Split.TRAIN, Purpose.EVAL: Split.HELDOUT}


class GradedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task and what grades it."""

    task: Task
    hidden: HiddenTests


class TaskBook:
    """Both splits, each read once from the store."""

    def __init__(self, store: ObjectStore) -> None:
        """Read nothing yet."""
        self._store = store
        self._splits: dict[Split, dict[str, GradedTask]] = {}

    async def find(self, purpose: Purpose, task_id: str) -> GradedTask:
        """Return a task of the split that the purpose uses.

        Raises:
            NotFoundError: No such task, or the store lacks the split.

        """
        split = _SPLITS.get(purpose)
        if split is None:
            raise NotFoundError(f"{task_id}: rollouts for {purpose} have no tasks")
        if split not in self._splits:
            self._splits[split] = await self._load(split)
        tasks = self._splits[split]
        if task_id not in tasks:
            raise NotFoundError(f"task {task_id} is none of the {len(tasks)} of {split}")
        return tasks[task_id]

    async def _load(self, split: Split) -> dict[str, GradedTask]:
        hidden = await load_hidden_tests(self._store, split)
        return {
            task.task_id: GradedTask(task=task, hidden=hidden[task.task_id])
            for task in await load_tasks(self._store, split)
            if task.task_id in hidden
        }
