"""Runs the hidden tests of one step, or of a task without steps, on the files an episode left.

```
 fresh machine ◀─ the task's files ◀─ the episode's changes ◀─ hidden calls ─▶ results
                                                verdict ◀─ compare with expected results ◀─┘
 8 rollouts of a task ──▶ 3 distinct results ──▶ 3 fresh machines ──▶ 8 verdicts
```
An episode that changed nothing fails without a run: every task's tests fail on the unchanged files
(the null patch), or it would not have entered the task set. A verifier with fractional rewards is
run anyway: unchanged files may earn a fraction, which cancels out only if every rollout gets it.

Every distinct result is graded once, because rollouts of a group often leave identical files. A
verdict that shares a grading names the rollout that was graded, and no machine. Signs of cheating
belong to one episode and are never shared, and neither are failures of machines.
"""

import asyncio
import hashlib
from collections import OrderedDict
from pathlib import PurePosixPath
from weakref import WeakValueDictionary

import msgspec

from penstock.actors.judge.audit import audit, links_of
from penstock.actors.judge.config import KILLS_MAX, JudgeConfig
from penstock.actors.judge.reward import Findings
from penstock.actors.judge.set_ups import own_changes
from penstock.actors.runtime.context import Context
from penstock.envs.python_source import PythonSourceError, parse_python
from penstock.envs.sandbox import WORK_DIR, Sandbox, SandboxError
from penstock.envs.sandbox_client.client import REFUSALS, lease_sandbox
from penstock.envs.tasks.gates import read_report
from penstock.envs.tasks.grading import (
    FilesUnfitError,
    TaskUnfitError,
    TestsKilledError,
    run_hidden_tests,
)
from penstock.envs.tasks.harbor.foreign import gives_fractions, read_fraction
from penstock.envs.tasks.storage import GradedTask
from penstock.messages.errors import DeadlineError
from penstock.messages.reading.trajectories import Trajectory
from penstock.messages.retries import with_retries
from penstock.messages.reward import CheatFinding, CheatKind, Outcome
from penstock.messages.task import FileKind

_DETAIL_CHARACTERS_MAX = 400


class OneStepJudge:
    """Solved if and only if every hidden test of one step passes in a fresh machine.

    Use `task_steps.HiddenTestsJudge`: this one would judge a task by its first step only.
    """

    name = "hidden_tests"
    version = "6"

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config

    async def judge(self, rollout: Trajectory, task: GradedTask, ctx: Context) -> Findings:
        """Grade one rollout in a fresh machine, with retries.

        A rollout whose machines fail is masked, unless its files killed `KILLS_MAX` machines: then
        it is the policy's fault.
        """
        if (settled := settle(rollout, task)) is not None:
            return settled
        is_first = True
        killed: list[str] = []

        async def attempt() -> Findings:
            nonlocal is_first
            lease_id = ctx.new_id("grade")
            holder = f"judge.{rollout.finished.rollout_id}"
            spec = self._config.lease_spec(lease_id, task.task, holder)
            # Another host next, so that one broken host cannot make a policy's files look deadly.
            avoid_host = killed[-1] if killed else ""
            # The first attempt ends the machine of a judge that died with this rollout in hand.
            spec = msgspec.structs.replace(spec, takes_over=is_first, avoid_host=avoid_host)
            is_first = False
            async with lease_sandbox(ctx, lease_id, spec) as sandbox:
                try:
                    return await grade(rollout, task, sandbox, self._config.output_bytes_max)
                except TestsKilledError:
                    killed.append(sandbox.host)
                    raise

        try:
            return await with_retries(
                attempt,
                self._config.retry,
                # Refusals repeat on every host, and so does a kill that happened twice.
                retry_on=(SandboxError, DeadlineError),
                is_final=lambda error: isinstance(error, REFUSALS) or len(killed) >= KILLS_MAX,
            )
        except (SandboxError, DeadlineError) as error:
            if len(killed) >= KILLS_MAX:
                return _unfit(f"{len(killed)} machines killed: {error}", rollout, task)
            return Findings(outcome=Outcome.INFRASTRUCTURE_ERROR, detail=str(error))


def settle(rollout: Trajectory, task: GradedTask) -> Findings | None:
    """Return findings that need no run, or None."""
    if broken := broken_tests(task):
        return Findings(outcome=Outcome.JUDGE_ERROR, detail=broken)
    is_changed = rollout.files or rollout.finished.deleted or rollout.states
    if not (is_changed or gives_fractions(task.hidden)):
        detail = "no file changed: the tests are known to fail on the unchanged files"
        return weigh(Findings(outcome=Outcome.FAILED, detail=detail), audit(rollout, task))
    if forbidden := touched_hidden_files(rollout, task):
        detail = f"the episode wrote to paths of hidden tests: {', '.join(forbidden)}"
        kind = CheatKind.HIDDEN_TESTS
        found = [
            CheatFinding(kind=kind, where=f"file {path}", detail="a hidden test", is_decisive=True)
            for path in forbidden
        ]
        return weigh(
            Findings(outcome=Outcome.POLICY_ERROR, detail=detail), found + audit(rollout, task)
        )
    return None


def weigh(findings: Findings, cheats: list[CheatFinding]) -> Findings:
    """Add an episode's signs of cheating; a decisive sign turns any success into a policy error."""
    decisive = [f"{one.kind} ({one.where}: {one.detail})" for one in cheats if one.is_decisive]
    outcome, detail = findings.outcome, findings.detail
    if decisive and (outcome is Outcome.SOLVED or findings.score):
        outcome, detail = Outcome.POLICY_ERROR, f"solved by cheating: {', '.join(decisive)}"
    return msgspec.structs.replace(findings, outcome=outcome, detail=detail, cheats=cheats)


async def grade(
    rollout: Trajectory, task: GradedTask, sandbox: Sandbox, output_bytes_max: int
) -> Findings:
    """Run the hidden tests in a fresh machine on the episode's files, and audit the episode.

    Raises:
        SandboxError: The machine failed.

    """
    try:
        done = await run_hidden_tests(
            sandbox,
            task,
            rollout.files,
            deleted=rollout.finished.deleted,
            states=rollout.states,
            output_bytes_max=output_bytes_max,
        )
    except TaskUnfitError as error:
        return Findings(outcome=Outcome.JUDGE_ERROR, detail=str(error))
    except FilesUnfitError as error:
        return _unfit(f"they cannot be written to a machine: {error}", rollout, task)
    report = read_report(done, task.hidden.expected)
    tail = (done.stdout + done.stderr).decode("utf-8", "replace")[-_DETAIL_CHARACTERS_MAX:]
    findings = Findings(
        outcome=Outcome.SOLVED if report.is_solved else Outcome.FAILED,
        score=read_fraction(done, task.hidden),
        num_tests_passed=report.num_passed,
        num_tests=report.num_tests,
        sandbox=sandbox.info,
        detail="" if report.is_solved else tail,
    )
    return weigh(findings, audit(rollout, task))


def _unfit(why: str, rollout: Trajectory, task: GradedTask) -> Findings:
    found = CheatFinding(kind=CheatKind.UNFIT, where="files", detail=why, is_decisive=True)
    unfit = Findings(outcome=Outcome.POLICY_ERROR, detail=f"files of the episode: {why}")
    return weigh(unfit, [found, *audit(rollout, task)])


def broken_tests(task: GradedTask) -> str:
    """Return why hidden tests cannot run, or an empty string; no evidence about the policy."""
    for path, data in task.hidden.contents.items():
        if path.endswith(".py"):
            try:
                parse_python(data)
            except PythonSourceError as error:
                return f"task {task.task.task_id}: hidden test {path} {error}"
    if not task.hidden.files or not task.hidden.expected:
        return f"task {task.task.task_id}: has no hidden tests"
    return ""


def touched_hidden_files(rollout: Trajectory, task: GradedTask) -> list[str]:
    """Return the episode's paths that would overwrite or shadow a hidden test, sorted.

    A path shadows if it is a file in place of a hidden file's folder, a folder in place of the
    file, or a package of the same module name. Paths outside of the working directory count, too.
    """
    begun_with = task.begun_with
    # Its folders and module name count, too: whatever an import would find before the test.
    hidden = {PurePosixPath(path) for path in task.hidden.contents}
    places = hidden | {parent for path in hidden for parent in path.parents if parent.name}
    modules = {path.with_suffix("") for path in hidden if path.suffix == ".py"}
    own = own_changes(rollout, task)
    tests = {PurePosixPath(WORK_DIR, test) for test in hidden}
    reached = tests | {folder for test in tests for folder in test.parents} - _OPEN_FOLDERS
    touching = set(own.files)
    for one in own.states:
        path = one.path.decode("utf-8", "backslashreplace")
        is_way = one.kind is FileKind.FOLDER and PurePosixPath(path) in places - hidden
        if one.kind is not FileKind.GONE and not is_way:
            touching.add(path)
    leading = {path for path, target in links_of(own.states).items() if target in reached}
    return sorted(
        path
        for path in touching
        if path in leading
        or (_shadows(PurePosixPath(path), places, hidden | modules) and path not in begun_with)
    )


_OPEN_FOLDERS = {PurePosixPath(WORK_DIR), *PurePosixPath(WORK_DIR).parents}
"""A link to one of them leads to no hidden test by itself."""


def _shadows(path: PurePosixPath, places: set[PurePosixPath], folders: set[PurePosixPath]) -> bool:
    is_outside = path.is_absolute() or ".." in path.parts
    return is_outside or path in places or path in folders or not folders.isdisjoint(path.parents)


NUM_RESULTS_MAX = 4096
"""Gradings remembered; the oldest is forgotten first, and graded again if it comes back."""
_SHARED = frozenset({Outcome.SOLVED, Outcome.FAILED})


class SameFilesJudge:
    """Asks another judge once per distinct set of files of a task."""

    def __init__(self, judge: OneStepJudge) -> None:
        self.name, self.version = judge.name, judge.version
        self._judge = judge
        self._found: OrderedDict[bytes, tuple[str, Findings]] = OrderedDict()
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def judge(self, rollout: Trajectory, task: GradedTask, ctx: Context) -> Findings:
        """Grade one rollout, or return the findings of another one with the same files."""
        key = result_digest(rollout, task.step)
        # Rollouts of a group finish together: the lock makes the others wait for one grading,
        # which its lease and retries bound.
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key in self._found:
                first_id, findings = self._found[key]
                detail = f"same files as {first_id}"
                shared = msgspec.structs.replace(findings, detail=detail, sandbox=None)
                return weigh(shared, audit(rollout, task))
            findings = await self._judge.judge(rollout, task, ctx)
            # Failures of machines do not depend on the files, so another rollout may succeed.
            if findings.outcome in _SHARED:
                self._remember(key, rollout.finished.rollout_id, findings)
            return findings

    def _remember(self, key: bytes, rollout_id: str, findings: Findings) -> None:
        self._found[key] = (rollout_id, findings)
        if len(self._found) > NUM_RESULTS_MAX:
            self._found.popitem(last=False)


def result_digest(rollout: Trajectory, step: int) -> bytes:
    """Return 16 bytes that identify a task's step and the files that an episode left."""
    result = (
        rollout.finished.purpose,
        rollout.finished.task_id,
        step,
        sorted(rollout.files.items()),
        sorted(rollout.finished.deleted),
        *([rollout.states] if rollout.states else []),
    )
    return hashlib.blake2b(msgspec.msgpack.encode(result), digest_size=16).digest()
