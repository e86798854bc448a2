"""Runs hidden tests on what an episode left, in a fresh machine: one way, for judge and gates.

```
 the task's files, its tests ──▶ machine ◀── the episode's files; what is in their way is removed
   tests with a peer:  the verifier's user runs them ──socket──▶ the agent's user runs the code
   tests without one:  print results, which only the caller can compare (`gates.read_report`)
```
Delegation to the machine's own right copy (`HiddenTests.sealed_modules`) is impossible: over every
installed file of such a module lies the episode's own, and over its bytecode nothing at all, for
the process of the code under test alone. Without root, nobody takes that off.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from penstock.envs.sandbox import (
    WORK_DIR,
    Sandbox,
    SandboxFileError,
    SandboxKilled,
    VerifierRun,
    networked,
    verifying,
)
from penstock.envs.tasks.file_states import lay_out
from penstock.envs.tasks.storage import GradedTask
from penstock.messages.errors import PenstockError
from penstock.messages.sandbox import ExecResult
from penstock.messages.task import FileState, HiddenTests, Task

PREPARE_S_MAX = 30.0
_PATHS_AT_ONCE = 500
_NOTHING = "/dev/null"
_LIBRARIES = tuple(
    f"{place}/python3*{below}"
    for place in ("/usr/lib", "/usr/local/lib")
    for below in ("", "/dist-packages", "/site-packages")
)


class TaskUnfitError(PenstockError, ValueError):
    """A task's own files or tests cannot be laid out in its machine: the task's fault."""


class FilesUnfitError(PenstockError, ValueError):
    """What an episode left cannot be laid out again: the policy's fault."""


class TestsKilledError(SandboxKilled):
    """A machine ended by itself while the code under test ran in it."""


async def run_hidden_tests(  # noqa: PLR0913 - what was left, and the bound
    sandbox: Sandbox,
    graded: GradedTask,
    left: Mapping[str, bytes],
    *,
    deleted: Collection[str] = (),
    states: Collection[FileState] = (),
    output_bytes_max: int,
) -> ExecResult:
    """Lay everything out in a fresh machine and run the tests.

    Args:
        sandbox: The machine.
        graded: What the episode began with, and its tests.
        left: Files that the episode changed or added.
        deleted: Files that it deleted, of the task or of its image.
        states: What else it changed of files.
        output_bytes_max: Kept of the tests' output.

    Raises:
        TaskUnfitError: The task's own files, or its tests, do not fit into the machine.
        FilesUnfitError: What the episode left does not.
        TestsKilledError: The machine ended by itself while the tests ran.
        SandboxError: The machine failed.

    """
    task, hidden = graded.task, graded.hidden
    own = hidden.contents
    left = {path: left[path] for path in left if path not in own}
    states = [one for one in states if one.name not in own]
    await _lay_out_task(sandbox, task, hidden, deleted)
    await _in_pieces(sandbox, ["rm", "-f", "--"], set(deleted).difference(task.contents))
    await _lay_out_episode(sandbox, task, left, states)
    if hidden.egress and not hidden.peer:
        await networked(sandbox).allow_egress(hidden.egress)
    if hidden.peer:
        await sandbox.exec(["chmod", "0700", WORK_DIR], timeout_s=PREPARE_S_MAX)
    run = VerifierRun(
        argv=hidden.argv,
        timeout_s=hidden.timeout_s,
        output_bytes_max=output_bytes_max,
        peer=hidden.peer,
        covers=covers(task, hidden, {*task.files, *left}.difference(deleted)),
    )
    try:
        if run.peer or run.covers:
            return await verifying(sandbox).verify(run)
        return await sandbox.exec(
            run.argv, timeout_s=run.timeout_s, output_bytes_max=run.output_bytes_max
        )
    except SandboxKilled as error:
        raise TestsKilledError(str(error)) from error


def covers(task: Task, hidden: HiddenTests, there: Collection[str]) -> list[tuple[str, str]]:
    """Return what lies over the installed files of sealed modules (`VerifierRun.covers`).

    Args:
        task: Its file of a sealed module, as the episode left it, lies over the module's.
        hidden: Names the modules.
        there: Files that are there when the tests run: over a module without one lies nothing.

    """
    pairs: list[tuple[str, str]] = []
    for module in hidden.sealed_modules:
        plain = module.replace(".", "/")
        for name in (f"{plain}.py", f"{plain}/__init__.py"):
            ours = [path for path in task.files if f"/{path}".endswith(f"/{name}")]
            file = next((f"{WORK_DIR}/{path}" for path in ours if path in there), _NOTHING)
            folder, _, stem = f"/{name.removesuffix('.py')}".rpartition("/")
            for root in _LIBRARIES:
                pairs.append((file, f"{root}/{name}"))
                pairs.append((_NOTHING, f"{root}{folder}/__pycache__/{stem}.*.pyc"))
    return pairs


async def _lay_out_task(
    sandbox: Sandbox, task: Task, hidden: HiddenTests, deleted: Collection[str]
) -> None:
    kept = {path: data for path, data in task.contents.items() if path not in deleted}
    states = [one for one in task.states if one.name not in deleted]
    try:
        if hidden.peer:
            await lay_out(sandbox, kept, states)
            await verifying(sandbox).write_verifier_files(hidden.contents)
        else:
            await lay_out(sandbox, kept | hidden.contents, [*states, *hidden.states])
    except SandboxFileError as error:
        raise TaskUnfitError(f"task {task.task_id}: {error}") from error


async def _lay_out_episode(
    sandbox: Sandbox, task: Task, left: Mapping[str, bytes], states: Collection[FileState]
) -> None:
    """Lay out what an episode left over what is there already, whatever is in its way."""
    clears = bool(task.image or states or task.states)
    try:
        await lay_out(sandbox, left, states, clears=clears)
    except SandboxFileError as error:
        if clears:
            raise FilesUnfitError(str(error)) from error
        try:
            await lay_out(sandbox, left, states, clears=True)
        except SandboxFileError as second:
            raise FilesUnfitError(str(second)) from second


async def _in_pieces(sandbox: Sandbox, command: list[str], paths: Iterable[str]) -> None:
    """Run a command on all paths, some at a time: a command line has its bounds."""
    waiting = iter(paths)
    while piece := list(islice(waiting, _PATHS_AT_ONCE)):
        await sandbox.exec([*command, *piece], timeout_s=PREPARE_S_MAX)
