"""Machines for drafting and gates: fresh ones from a pool, bounded in time and output."""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec

from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.needs import DEFAULT_NEEDS
from penstock.envs.sandbox import Sandbox, SandboxError, SandboxFileError
from penstock.envs.tasks.changes import Changes, ChangesError, list_work, read_changes
from penstock.envs.tasks.file_states import lay_out
from penstock.envs.tasks.gates import SuiteReport, read_report, write_solution
from penstock.envs.tasks.grading import FilesUnfitError, TaskUnfitError, run_hidden_tests
from penstock.envs.tasks.harbor.foreign import SOLUTION_FOLDER, SOLVE_FILE, gives_fractions
from penstock.envs.tasks.set_ups import has_set_up
from penstock.envs.tasks.source import Rejection, TaskRejectedError
from penstock.envs.tasks.storage import GradedTask
from penstock.envs.tasks.workspace import (
    SetupError,
    contents_at,
    open_step,
    open_workspace,
    states_at,
)
from penstock.messages.errors import DeadlineError
from penstock.messages.sandbox import ExecResult
from penstock.messages.task import HiddenTests, MachineNeeds, Task

log = logging.getLogger(__name__)

RUN_S_MAX = 60.0
LEASE_S = 300.0
WAIT_S = 300.0
OUTPUT_BYTES_MAX = 256 << 10
OUTPUT_SHOWN_MAX = 1_000
NUM_FILES_MAX, NUM_BYTES_MAX = 1_000, 8 << 20
"""What a known solution may leave: as much as an episode by default."""


class MachineBench:
    """One machine that runs a plan's code; its owner closes it."""

    def __init__(self, machine: Sandbox) -> None:
        self._machine = machine

    async def run(
        self, files: Mapping[str, str], argv: list[str], variants: Sequence[Mapping[str, str]]
    ) -> list[list[str] | None]:
        """Run a program once per variant of the files; the n-th run has hash seed n.

        Returns:
            Lines of output of each run; None if it failed or did not end.

        """
        # Files that any variant changes are restored before each run.
        touched = {path: files[path] for one in variants for path in one if path in files}
        await self._machine.write_files(_encoded(files))
        runs: list[list[str] | None] = []
        for number, variant in enumerate(variants):
            if touched:
                await self._machine.write_files(_encoded(touched | dict(variant)))
            done = await self._machine.exec(
                argv,
                timeout_s=RUN_S_MAX,
                # Another seed per run reveals results that depend on the order of sets.
                env={"PYTHONHASHSEED": str(number + 1)},
                output_bytes_max=OUTPUT_BYTES_MAX,
            )
            runs.append(_lines(done))
        return runs

    async def test(
        self, task: Task, hidden: HiddenTests, changes: Mapping[str, str]
    ) -> list[str] | None:
        """Run a task's hidden tests on its files with changes; returns lines as `run` does.

        Raises:
            TaskRejectedError: The files do not fit into the machine.

        """
        return _lines(await _test(self._machine, task, hidden, Changes(files=_encoded(changes))))


class MachineLab:
    """Fresh machines for benches and gradings, from a pool that its owner closes."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @asynccontextmanager
    async def bench(self) -> AsyncIterator[MachineBench]:
        """Lease a fresh machine; its failure raises `TaskRejectedError` with `MACHINE`."""
        async with self._machine() as machine:
            yield MachineBench(machine)

    async def grade(self, task: Task, hidden: HiddenTests, changes: Changes) -> SuiteReport:
        """Run the hidden tests on the task's files with some changed, in a fresh machine."""
        lease_s = LEASE_S + hidden.timeout_s
        async with self._machine(task.image, task.machine, lease_s) as machine:
            done = await _test(machine, task, hidden, changes)
        output = (done.stdout + done.stderr).decode("utf-8", "replace").strip()
        report = read_report(done, hidden.expected)
        return msgspec.structs.replace(report, output=output[-OUTPUT_SHOWN_MAX:])

    async def solve(self, task: GradedTask, is_gold: bool) -> list[Changes]:
        """Run a known solution that is a program, or nothing, as an episode runs; see `Solve`.

        Raises:
            TaskRejectedError: The machine failed, or what is left cannot be carried over.

        """
        is_program = gives_fractions(task.hidden)
        if not is_program or not (is_gold or has_set_up(task.task)):
            return await write_solution(task, is_gold)
        lease_s = LEASE_S + task.task.limits.wall_s_max * (len(task.task.steps) + 1)
        async with self._machine(task.task.image, task.task.machine, lease_s) as machine:
            try:
                return await run_solution(machine, task, is_gold=is_gold)
            except (ChangesError, SandboxFileError) as error:
                raise TaskRejectedError(Rejection.DOES_NOT_RUN, str(error)) from error

    @asynccontextmanager
    async def _machine(
        self, image: str = "", needs: MachineNeeds = DEFAULT_NEEDS, lease_s: float = LEASE_S
    ) -> AsyncIterator[Sandbox]:
        try:
            lease = await self._pool.acquire(lease_s, timeout_s=WAIT_S, image=image, machine=needs)
            try:
                yield lease.sandbox
            finally:
                await self._pool.release(lease.lease_id)
        except (SandboxError, DeadlineError) as error:
            raise TaskRejectedError(Rejection.MACHINE, str(error)) from error


async def run_solution(machine: Sandbox, task: GradedTask, *, is_gold: bool) -> list[Changes]:
    """Run a task's known solution in an episode's machine; return what each step leaves.

    Raises:
        ChangesError: It cannot be carried over.
        SandboxError: The machine failed.

    """
    layer = await list_work(machine) if task.task.image else {}
    await open_workspace(machine, task.task, "gate", has_git=False)
    left: list[Changes] = []
    hiddens = [task.hidden, *task.hidden.steps]
    for step, hidden in enumerate(hiddens):
        try:
            if step:
                await open_step(machine, task.task.steps[step - 1])
        except SetupError as error:
            log.info("task %s: step %d cannot be laid out: %s", task.task.task_id, step + 1, error)
            return [*left, *[left[-1]] * (len(hiddens) - step)]  # So would an episode end here.
        if is_gold:
            await lay_out(machine, hidden.gold_contents, hidden.gold_states, clears=bool(step))
            await machine.exec(
                ["bash", SOLUTION_FOLDER + SOLVE_FILE],
                timeout_s=task.task.limits.wall_s_max,
                env=hidden.gold_env,
            )
        left.append(
            await read_changes(
                machine,
                contents_at(task.task, step),
                states=states_at(task.task, step),
                num_files_max=NUM_FILES_MAX,
                num_bytes_max=NUM_BYTES_MAX,
                has_layer=bool(task.task.image),
                layer=layer,
            )
        )
    return left


async def _test(machine: Sandbox, task: Task, hidden: HiddenTests, changes: Changes) -> ExecResult:
    graded = GradedTask(task=task, hidden=hidden)
    try:
        return await run_hidden_tests(
            machine,
            graded,
            changes.files,
            deleted=changes.deleted,
            states=changes.states,
            output_bytes_max=OUTPUT_BYTES_MAX,
        )
    except (TaskUnfitError, FilesUnfitError) as error:
        raise TaskRejectedError(Rejection.DOES_NOT_RUN, str(error)) from error


def _lines(done: ExecResult) -> list[str] | None:
    if done.exit_code != 0 or done.timed_out or done.truncated:
        return None
    return done.stdout.decode("utf-8", "replace").removesuffix("\n").split("\n")


def _encoded(files: Mapping[str, str]) -> dict[str, bytes]:
    return {path: text.encode("utf-8", "surrogatepass") for path, text in files.items()}
