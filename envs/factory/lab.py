"""Machines for drafting and gates: fresh ones from a pool, bounded in time and output."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.needs import DEFAULT_NEEDS
from penstock.envs.sandbox import Sandbox, SandboxError
from penstock.envs.tasks.gates import SuiteReport, read_report
from penstock.envs.tasks.grading import FilesUnfitError, TaskUnfitError, run_hidden_tests
from penstock.envs.tasks.source import Rejection, TaskRejectedError
from penstock.envs.tasks.storage import GradedTask
from penstock.messages.errors import DeadlineError
from penstock.messages.sandbox import ExecResult
from penstock.messages.task import HiddenTests, MachineNeeds, Task

RUN_S_MAX = 60.0
LEASE_S = 300.0
WAIT_S = 300.0
OUTPUT_BYTES_MAX = 256 << 10


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
        return _lines(await _test(self._machine, task, hidden, _encoded(changes)))


class MachineLab:
    """Fresh machines for benches and gradings, from a pool that its owner closes."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @asynccontextmanager
    async def bench(self) -> AsyncIterator[MachineBench]:
        """Lease a fresh machine; its failure raises `TaskRejectedError` with `MACHINE`."""
        async with self._machine() as machine:
            yield MachineBench(machine)

    async def grade(
        self, task: Task, hidden: HiddenTests, changes: Mapping[str, bytes]
    ) -> SuiteReport:
        """Run the hidden tests on the task's files with changes, in a fresh machine."""
        lease_s = LEASE_S + hidden.timeout_s
        async with self._machine(task.image, task.machine, lease_s) as machine:
            done = await _test(machine, task, hidden, changes)
        return read_report(done, hidden.expected)

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


async def _test(
    machine: Sandbox, task: Task, hidden: HiddenTests, changes: Mapping[str, bytes]
) -> ExecResult:
    graded = GradedTask(task=task, hidden=hidden)
    try:
        return await run_hidden_tests(machine, graded, changes, output_bytes_max=OUTPUT_BYTES_MAX)
    except (TaskUnfitError, FilesUnfitError) as error:
        raise TaskRejectedError(Rejection.DOES_NOT_RUN, str(error)) from error


def _lines(done: ExecResult) -> list[str] | None:
    if done.exit_code != 0 or done.timed_out or done.truncated:
        return None
    return done.stdout.decode("utf-8", "replace").removesuffix("\n").split("\n")


def _encoded(files: Mapping[str, str]) -> dict[str, bytes]:
    return {path: text.encode("utf-8", "surrogatepass") for path, text in files.items()}
