"""What a task's set-up makes of its files, in a machine that no policy has had.

```
 fresh machine ◀─ files, setup.sh of step 0 ─▶ made[0] ◀─ files, setup.sh of step 1 ─▶ made[1] ..
 what an episode left ── but for what is just as it was made ──▶ what the policy changed
```
An episode's changes are against the files that its task wrote, so what `setup.sh` made is among
them. What lies in the episode's own machine proves nothing about who wrote it once the policy has
had that machine; a file with the very content that the task itself makes needs no proof.
"""

import asyncio
import contextlib
from collections import OrderedDict
from weakref import WeakValueDictionary

import msgspec

from penstock.actors.judge.config import JudgeConfig
from penstock.actors.runtime.context import Context
from penstock.envs.sandbox import Sandbox, SandboxError
from penstock.envs.sandbox_client.client import REFUSALS
from penstock.envs.sandbox_client.lease import lease_sandbox
from penstock.envs.tasks.changes import ChangesError, list_work, read_changes
from penstock.envs.tasks.storage import GradedTask, Made
from penstock.envs.tasks.workspace import SetupError, contents_at, open_step, open_workspace
from penstock.messages.errors import DeadlineError
from penstock.messages.reading.trajectories import Trajectory
from penstock.messages.rpc import with_retries
from penstock.messages.task import Split, Task

NUM_FILES_MAX = 2_000
NUM_BYTES_MAX = 8 << 20
"""Of what a task's set-up makes; where it is more, it counts as the policy's."""
KEPT_BYTES_MAX = 256 << 20
"""Of all tasks; the least recently used are made again."""
_FILE_BYTES = 256
"""What a file takes besides its path and content."""


class SetUps:
    """Runs the set-up of each task, where it has one, and keeps what it made."""

    def __init__(self, config: JudgeConfig) -> None:
        """Take the bounds of a grading machine."""
        self._config = config
        self._made: OrderedDict[tuple[Split, str], list[Made]] = OrderedDict()
        """The most recently used is the last."""
        self._num_bytes = 0
        self._locks: WeakValueDictionary[tuple[Split, str], asyncio.Lock] = WeakValueDictionary()

    async def add(self, task: GradedTask, ctx: Context) -> GradedTask:
        """Return a task with what its set-up makes.

        Raises:
            SandboxError: No machine could run it.
            DeadlineError: None answered in time.

        """
        if not any(one.has_setup for one in (task.task, *task.task.steps)):
            return task
        key = (task.task.split, task.task.task_id)
        async with self._locks.setdefault(key, asyncio.Lock()):
            made = self._made.get(key)
            if made is None:
                made = await self._run(task.task, ctx)
                self._keep(key, made)
            else:
                self._made.move_to_end(key)
            return msgspec.structs.replace(task, made=made)

    def _keep(self, key: tuple[Split, str], made: list[Made]) -> None:
        self._made[key] = made
        self._num_bytes += _num_bytes(made)
        while self._num_bytes > KEPT_BYTES_MAX:
            _, oldest = self._made.popitem(last=False)
            self._num_bytes -= _num_bytes(oldest)

    async def _run(self, task: Task, ctx: Context) -> list[Made]:
        config = self._config

        async def attempt() -> list[Made]:
            lease_id = ctx.new_id("set-up")
            async with lease_sandbox(ctx, lease_id, config.lease_spec(lease_id, task)) as sandbox:
                return await run_set_ups(sandbox, task)

        return await with_retries(
            attempt,
            config.retry,
            retry_on=(SandboxError, DeadlineError),
            is_final=lambda error: isinstance(error, REFUSALS),
        )


def _num_bytes(made: list[Made]) -> int:
    files = [file for step in made for file in step.items()]
    return sum(_FILE_BYTES + len(path) + len(data or b"") for path, data in files)


async def run_set_ups(sandbox: Sandbox, task: Task) -> list[Made]:
    """Return by step what its set-up and those before it made in a fresh machine.

    One that fails, because it needs what an episode would have left, has made what is there then.

    Raises:
        SandboxError: The machine failed, or the first set-up in it.

    """
    layer_files = await list_work(sandbox) if task.image else []
    await open_workspace(sandbox, task, "set-up", has_git=False)
    made: list[Made] = []
    for number in range(len(task.steps) + 1):
        if number:
            with contextlib.suppress(SetupError):
                await open_step(sandbox, task.steps[number - 1])
        try:
            changes = await read_changes(
                sandbox,
                contents_at(task, number),
                num_files_max=NUM_FILES_MAX,
                num_bytes_max=NUM_BYTES_MAX,
                has_layer=bool(task.image),
                layer_files=layer_files,
            )
        except ChangesError:
            made.append({})
        else:
            made.append(changes.files | dict.fromkeys(changes.deleted))
    return made


def own_changes(rollout: Trajectory, task: GradedTask) -> Trajectory:
    """Return a rollout with the policy's changes alone: without what is as set-ups made it."""
    made, contents = task.made_by_now, task.task.contents
    left, gone = rollout.files, rollout.finished.deleted
    now = {path: left.get(path, None if path in gone else contents.get(path)) for path in made}
    changed = {path: data for path, data in now.items() if data != made[path]}
    files = {path: data for path, data in left.items() if path not in made}
    files |= {path: data for path, data in changed.items() if data is not None}
    deleted = [path for path in gone if path not in made]
    deleted += [path for path, data in changed.items() if data is None]
    finished = msgspec.structs.replace(rollout.finished, deleted=sorted(deleted))
    return msgspec.structs.replace(rollout, finished=finished, files=files)
