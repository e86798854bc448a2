"""Runs the hidden tests of one step, or of a task without steps, on what the episode left behind.

```
 fresh machine ◀─ the task's own files ◀─ the episode's changes ◀─ hidden calls ─▶ results
                                                     verdict ◀─ compare with what is expected ◀─┘
 8 rollouts of a task ──▶ 3 distinct results ──▶ 3 fresh machines ──▶ 8 verdicts
```
An episode that changed nothing is not run: no task enters a task set unless its tests fail on the
unchanged files (the null patch), so the answer is known. The verdict names that. A verifier that
gives parts of a reward is run all the same: what the unchanged files earn is no one's work, and
cancels out only if everybody gets it.

Every distinct result is graded once: rollouts of a group often leave the very same files behind. A
verdict that shares another's grading names it, and no machine: it had none of its own. Signs of
cheating belong to one episode and are never shared. Tests that give two answers for the same files
are flaky, and the gates keep such tasks out. A machine's failure is not shared: it depends on no
file.
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
from penstock.messages.file_states import FileKind
from penstock.messages.reading.trajectories import Trajectory
from penstock.messages.retries import with_retries
from penstock.messages.reward import CheatFinding, CheatKind, Outcome

_DETAIL_CHARACTERS_MAX = 400


class OneStepJudge:
    """Solved if and only if every hidden test of one step passes in a fresh machine.

    `task_steps.HiddenTestsJudge` asks it about every step; nobody else should, since a task of
    several steps would be judged by its first.
    """

    name = "hidden_tests"
    version = "6"

    def __init__(self, config: JudgeConfig) -> None:
        """Take the bounds."""
        self._config = config

    async def judge(self, rollout: Trajectory, task: GradedTask, ctx: Context) -> Findings:
        """Grade one rollout; a machine that fails is replaced, then the rollout is masked.

        Unless its files kill machine after machine by themselves: then it is the policy's fault.
        The first ends the machine of a judge that had the rollout before and may be gone.
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
            avoid_host = killed[-1] if killed else ""
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
                retry_on=(SandboxError, DeadlineError),
                is_final=lambda error: isinstance(error, REFUSALS) or len(killed) >= KILLS_MAX,
            )
        except (SandboxError, DeadlineError) as error:
            if len(killed) >= KILLS_MAX:
                return _unfit(f"{len(killed)} machines killed: {error}", rollout, task)
            return Findings(outcome=Outcome.INFRASTRUCTURE_ERROR, detail=str(error))


def settle(rollout: Trajectory, task: GradedTask) -> Findings | None:
    """Return what is known without running anything, or None."""
    if broken := broken_tests(task):
        return Findings(outcome=Outcome.JUDGE_ERROR, detail=broken)
    is_changed = rollout.files or rollout.finished.deleted or rollout.states
    if not (is_changed or gives_fractions(task.hidden)):
        detail = "no file changed: the tests are known to fail on the unchanged files"
        return weigh(Findings(outcome=Outcome.FAILED, detail=detail), audit(rollout, task))
    if forbidden := touched_hidden_files(rollout, task):
        detail = f"the episode wrote where hidden tests lie: {', '.join(forbidden)}"
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
    """Add an episode's own signs of cheating to what is known of the files it left.

    A solved task, or a part of one, with a decisive sign is the policy's fault, not a success.
    """
    decisive = [f"{one.kind} ({one.where}: {one.detail})" for one in cheats if one.is_decisive]
    outcome, detail = findings.outcome, findings.detail
    if decisive and (outcome is Outcome.SOLVED or findings.score):
        outcome, detail = Outcome.POLICY_ERROR, f"solved by cheating: {', '.join(decisive)}"
    return msgspec.structs.replace(findings, outcome=outcome, detail=detail, cheats=cheats)


async def grade(
    rollout: Trajectory, task: GradedTask, sandbox: Sandbox, output_bytes_max: int
) -> Findings:
    """Run the hidden tests in a fresh machine on what the episode left behind, and weigh it.

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
        return _unfit(f"they cannot be laid out: {error}", rollout, task)
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
    """Return what an episode is worth whose files cannot be graded: it left them so."""
    found = CheatFinding(kind=CheatKind.UNFIT, where="files", detail=why, is_decisive=True)
    unfit = Findings(outcome=Outcome.POLICY_ERROR, detail=f"the files that it left: {why}")
    return weigh(unfit, [found, *audit(rollout, task)])


def broken_tests(task: GradedTask) -> str:
    """Return what is wrong with the hidden tests themselves, or an empty string.

    Tests that cannot run are no evidence about the policy.
    """
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

    Shadowing: a file where a hidden file's folder must be, a folder where the file must be, or a
    package of the same module name beside it. A path out of the working directory counts, too.
    """
    begun_with = task.begun_with
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
"""Remembered; the oldest is forgotten first, and graded again if it comes back."""
_SHARED = frozenset({Outcome.SOLVED, Outcome.FAILED})


class SameFilesJudge:
    """Asks another judge once for each set of files that a task was left with."""

    def __init__(self, judge: OneStepJudge) -> None:
        """Take the judge to ask."""
        self.name, self.version = judge.name, judge.version
        self._judge = judge
        self._found: OrderedDict[bytes, tuple[str, Findings]] = OrderedDict()
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def judge(self, rollout: Trajectory, task: GradedTask, ctx: Context) -> Findings:
        """Grade one rollout, or return what was found about another one with the same files.

        One that waits for another's grading waits as long as that may take, which is bounded.
        """
        key = result_digest(rollout, task.step)
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key in self._found:
                first_id, findings = self._found[key]
                detail = f"same files as {first_id}"
                shared = msgspec.structs.replace(findings, detail=detail, sandbox=None)
                return weigh(shared, audit(rollout, task))
            findings = await self._judge.judge(rollout, task, ctx)
            if findings.outcome in _SHARED:
                self._remember(key, rollout.finished.rollout_id, findings)
            return findings

    def _remember(self, key: bytes, rollout_id: str, findings: Findings) -> None:
        self._found[key] = (rollout_id, findings)
        if len(self._found) > NUM_RESULTS_MAX:
            self._found.popitem(last=False)


def result_digest(rollout: Trajectory, step: int) -> bytes:
    """Digest a step of a task and what the episode did to its files: 16 bytes."""
    result = (
        rollout.finished.purpose,
        rollout.finished.task_id,
        step,
        sorted(rollout.files.items()),
        sorted(rollout.finished.deleted),
        *([rollout.states] if rollout.states else []),
    )
    return hashlib.blake2b(msgspec.msgpack.encode(result), digest_size=16).digest()
