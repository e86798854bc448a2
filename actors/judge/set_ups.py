"""Runs a task's set-up in a fresh machine and records the files that it creates.

```
 fresh machine ◀─ files, setup.sh of step 0 ─▶ made[0] ◀─ files, setup.sh of step 1 ─▶ made[1] ..
                    once per task: the log keeps the result (`SetUpRecorded`) ◀─┘
```
`envs/tasks/set_ups.py` tells these files from the policy's.
"""

import asyncio
import contextlib
import logging
from weakref import WeakValueDictionary

import msgspec

from penstock.actors.judge.config import KILLS_MAX, JudgeConfig
from penstock.actors.runtime.context import Context
from penstock.envs.sandbox import Sandbox, SandboxError, SandboxKilled
from penstock.envs.sandbox_client.client import REFUSALS, lease_sandbox
from penstock.envs.tasks import set_ups
from penstock.envs.tasks.changes import Changes, ChangesError, list_work, read_changes
from penstock.envs.tasks.grading import TaskUnfitError
from penstock.envs.tasks.set_ups import Made, has_set_up, made_by, recorded_set_ups
from penstock.envs.tasks.storage import GradedTask
from penstock.envs.tasks.workspace import (
    SetupError,
    contents_at,
    open_step,
    open_workspace,
    states_at,
)
from penstock.messages.episode import SetUpRecorded
from penstock.messages.errors import CodecError, DeadlineError
from penstock.messages.reading.trajectories import Trajectory
from penstock.messages.retries import with_retries
from penstock.messages.rollout import EpisodeFiles
from penstock.messages.task import Split, Task

log = logging.getLogger(__name__)

NUM_FILES_MAX = 2_000
NUM_BYTES_MAX = 8 << 20
"""Bytes that one step's set-up may create; if it creates more, the files count as the policy's."""
TOTAL_BYTES_MAX = 32 << 20
"""Bytes of all steps' set-ups together; every rollout that is judged holds a copy."""


class StepKilledError(SandboxKilled):
    """A later step's set-up killed its machine, without any files of an episode."""


class SetUps:
    """Runs each task's set-up once, unless the log has its result."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._locks: WeakValueDictionary[tuple[Split, str], asyncio.Lock] = WeakValueDictionary()
        self._unfit: dict[tuple[Split, str], str] = {}
        """Reasons by task whose set-up kills machines; at most one per task of the run."""

    async def add(self, task: GradedTask, ctx: Context) -> GradedTask:
        """Return the task with the files that its set-up creates.

        Raises:
            SandboxError: No machine could run the set-up.
            TaskUnfitError: A later step's set-up killed `KILLS_MAX` machines.
            DeadlineError: No machine answered in time.

        """
        if not has_set_up(task.task):
            return task
        key = (task.task.split, task.task.task_id)
        # Rollouts of a group arrive together: one of them runs the set-up, the others wait.
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key in self._unfit:
                raise TaskUnfitError(self._unfit[key])
            made = await _recorded_before(task.task, ctx)
            if not made:
                try:
                    changes = await self._run(task.task, ctx)
                except TaskUnfitError as error:
                    # Only the text: the error would keep the frames of its callers alive.
                    self._unfit[key] = str(error)
                    log.error("set-up: %s", error)  # noqa: TRY400 - the text says it all
                    raise
                task_id, num_files = task.task.task_id, [len(one.files) for one in changes]
                log.info("task %s: set-up created %s files by step", task_id, num_files)
                events = [_recorded(task.task, *numbered) for numbered in enumerate(changes)]
                await ctx.publish(*events)
                made = [made_by(one) for one in changes]
            return msgspec.structs.replace(task, made=made)

    async def _run(self, task: Task, ctx: Context) -> list[Changes]:
        config = self._config
        killed: list[str] = []

        async def attempt() -> list[Changes]:
            lease_id = ctx.new_id("set-up")
            spec = config.lease_spec(lease_id, task)
            spec = msgspec.structs.replace(spec, avoid_host=killed[-1] if killed else "")
            async with lease_sandbox(ctx, lease_id, spec) as sandbox:
                try:
                    return await run_set_ups(sandbox, task)
                except StepKilledError as error:
                    killed.append(sandbox.host)
                    if len(killed) < KILLS_MAX:
                        raise
                    text = f"task {task.task_id}: {len(killed)} machines killed: {error}"
                    raise TaskUnfitError(text) from error

        return await with_retries(
            attempt,
            config.retry,
            retry_on=(SandboxError, DeadlineError),
            is_final=lambda error: isinstance(error, REFUSALS),
        )


async def _recorded_before(task: Task, ctx: Context) -> list[Made]:
    try:
        return await recorded_set_ups(ctx.store, ctx.last, task)
    except CodecError as error:  # The store lost it; a second event would not replace the first.
        log.warning("task %s: running the set-up again: %s", task.task_id, error)
        return []


def _recorded(task: Task, step: int, made: Changes) -> SetUpRecorded:
    return SetUpRecorded(
        split=task.split,
        task_id=task.task_id,
        step=step,
        files=EpisodeFiles(changed=made.files, states=made.states),
        deleted=made.deleted,
    )


async def run_set_ups(sandbox: Sandbox, task: Task) -> list[Changes]:
    """Return by step the changes that set-ups made up to and including that step.

    A later set-up may fail because it needs an episode's files; what it created counts anyway.

    Raises:
        StepKilledError: A later set-up killed the machine.
        SandboxError: The machine or the first set-up failed.

    """
    layer = await list_work(sandbox) if task.image else {}
    await open_workspace(sandbox, task, "set-up", has_git=False)
    made: list[Changes] = []
    num_bytes_left = TOTAL_BYTES_MAX
    for number in range(len(task.steps) + 1):
        try:
            if number:
                with contextlib.suppress(SetupError):
                    await open_step(sandbox, task.steps[number - 1])
            changes = await read_changes(
                sandbox,
                contents_at(task, number),
                num_files_max=NUM_FILES_MAX,
                num_bytes_max=min(NUM_BYTES_MAX, num_bytes_left),
                has_layer=bool(task.image),
                states=states_at(task, number),
                layer=layer,
            )
        except ChangesError:
            changes = Changes()  # Above the bounds: everything counts as the policy's.
        except SandboxKilled as error:
            if not number:
                raise
            raise StepKilledError(f"set-up of step {number + 1}: {error}") from error
        num_bytes_left -= sum(map(len, changes.files.values()))
        made.append(changes)
    return made


def own_changes(rollout: Trajectory, task: GradedTask) -> Trajectory:
    """Return a rollout with the policy's changes alone: without what is as set-ups made it."""
    left = Changes(files=rollout.files, deleted=rollout.finished.deleted, states=rollout.states)
    own = set_ups.own_changes(left, task.task.contents, task.made_by_now)
    finished = msgspec.structs.replace(rollout.finished, deleted=own.deleted)
    return msgspec.structs.replace(rollout, finished=finished, files=own.files)
