"""A run's tasks in its object store, apart from the tests that grade them.

```
 tasks/<split>          list[Task]         what an agent may see: pacer, evaluator, judge
 hidden_tests/<split>   list[HiddenTests]  what grades it, with known solutions: the judge (and the
                                           quickstart's sample users, who rate answers by them)
```
Both are msgpack. A role that never reads the second object cannot leak what is in it.
"""

from collections.abc import Iterable

import msgspec

from penstock.envs.tasks.harbor.folder import split_texts
from penstock.envs.tasks.set_ups import Made, begun_with
from penstock.envs.tasks.source import TaskCandidate
from penstock.envs.tasks.workspace import contents_at, states_at
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import NotFoundError
from penstock.messages.reading.parsing import parse_with
from penstock.messages.task import HiddenTests, Purpose, Split, Task

_tasks = msgspec.msgpack.Decoder(list[Task])
_hidden_tests = msgspec.msgpack.Decoder(list[HiddenTests])


def tasks_key(split: Split) -> str:
    """Return the key of a split's tasks."""
    return f"tasks/{split}"


def hidden_tests_key(split: Split) -> str:
    """Return the key of a split's hidden tests."""
    return f"hidden_tests/{split}"


def task_objects(candidates: Iterable[TaskCandidate], split: Split) -> dict[str, bytes]:
    """Return both objects of a split by their keys."""
    chosen = list(candidates)
    return {
        tasks_key(split): msgspec.msgpack.encode([one.task for one in chosen]),
        hidden_tests_key(split): msgspec.msgpack.encode([one.hidden for one in chosen]),
    }


async def load_tasks(store: ObjectStore, split: Split) -> list[Task]:
    """Return the tasks of a split.

    Raises:
        NotFoundError: The store has none.
        CodecError: What it has are no tasks, or their limits are out of bounds.

    """
    key = tasks_key(split)
    tasks: list[Task] = parse_with(_tasks, await store.get(key), key)
    return tasks


async def load_hidden_tests(store: ObjectStore, split: Split) -> dict[str, HiddenTests]:
    """Return the hidden tests of a split by task id; no actor but the judge may call this.

    Raises:
        NotFoundError: The store has none.
        CodecError: What it has are no hidden tests.

    """
    key = hidden_tests_key(split)
    tests: list[HiddenTests] = parse_with(_hidden_tests, await store.get(key), key)
    return {one.task_id: one for one in tests}


_SPLITS = {Purpose.TRAIN: Split.TRAIN, Purpose.EVAL: Split.HELDOUT}


class GradedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task and what grades it."""

    task: Task
    hidden: HiddenTests
    step: int = 0
    """Which of the task's steps, from 0."""
    made: list[Made] = []
    """By step, of its set-up and those before it; empty where there are none, or nobody looked."""

    @property
    def made_by_now(self) -> Made:
        """What was made of the step's files when the policy got them."""
        return self.made[self.step] if self.made else {}

    @property
    def begun_with(self) -> dict[str, bytes]:
        """The step's files as its set-up leaves them, but for the policy's."""
        return begun_with(self.task.contents, self.made_by_now)

    def at_step(self, step: int) -> "GradedTask":
        """Return one of its steps as a task, with all that was asked and written by then."""
        if not self.task.steps:
            return self
        files, binaries = split_texts(contents_at(self.task, step))
        asked = [self.task.instruction, *(each.instruction for each in self.task.steps[:step])]
        task = msgspec.structs.replace(
            self.task,
            instruction="\n\n".join(asked),
            files=files,
            binaries=binaries,
            states=states_at(self.task, step),
            steps=[],
        )
        hidden = self.hidden.steps[step - 1] if step else self.hidden
        return msgspec.structs.replace(self, task=task, hidden=hidden, step=step)


class TaskBook:
    """Both splits, each read once from the store."""

    def __init__(self) -> None:
        """Read nothing yet."""
        self._splits: dict[Split, dict[str, GradedTask]] = {}

    async def find(self, store: ObjectStore, purpose: Purpose, task_id: str) -> GradedTask:
        """Return a task of the split that the purpose uses.

        Raises:
            NotFoundError: No such task, or the store lacks the split.
            CodecError: What the store has of it cannot be read.

        """
        split = _SPLITS.get(purpose)
        if split is None:
            raise NotFoundError(f"{task_id}: rollouts for {purpose} have no tasks")
        if split not in self._splits:
            self._splits[split] = await _load_graded(store, split)
        tasks = self._splits[split]
        if task_id not in tasks:
            raise NotFoundError(f"task {task_id} is none of the {len(tasks)} of {split}")
        return tasks[task_id]


async def _load_graded(store: ObjectStore, split: Split) -> dict[str, GradedTask]:
    hidden = await load_hidden_tests(store, split)
    return {
        task.task_id: GradedTask(task=task, hidden=hidden[task.task_id])
        for task in await load_tasks(store, split)
        if task.task_id in hidden
    }
