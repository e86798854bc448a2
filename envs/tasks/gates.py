"""The gates that every task passes before it enters a task set, and how hidden tests are counted.

A test program runs in one process with the code under test, so nothing it claims counts: that code
can print, patch `builtins` or end the process with 0. The program prints results instead, one per
line at the end of its output, and only the caller knows what they must be.
"""

import operator
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from penstock.envs.tasks.changes import Changes
from penstock.envs.tasks.source import Rejection, TaskCandidate, TaskRejectedError
from penstock.envs.tasks.storage import GradedTask
from penstock.messages.sandbox import ExecResult
from penstock.messages.task import HiddenTests, Task


class SuiteReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run of hidden tests."""

    num_passed: int
    num_tests: int
    is_solved: bool
    output: str = ""
    """End of what the test program said, for people."""

    @property
    def result(self) -> tuple[int, int, bool]:
        """What must be the same in every run."""
        return (self.num_passed, self.num_tests, self.is_solved)


def read_report(done: ExecResult, expected: Sequence[str]) -> SuiteReport:
    """Compare the last lines of a test program with the expected results; too few: none passed."""
    num_tests = len(expected)
    lines = done.stdout.decode("utf-8", "replace").removesuffix("\n").split("\n")
    results = lines[len(lines) - num_tests :] if len(lines) >= num_tests else []
    num_passed = sum(map(operator.eq, results, expected))
    is_solved = (
        0 < num_tests == num_passed
        and done.exit_code == 0
        and not done.timed_out
        and not done.truncated
    )
    return SuiteReport(num_passed=num_passed, num_tests=num_tests, is_solved=is_solved)


REPEATS = 2


Grade = Callable[[Task, HiddenTests, Changes], Awaitable[SuiteReport]]
"""Runs the hidden tests on the task's files with some changed, in a fresh machine."""
Solve = Callable[[GradedTask, bool], Awaitable[list[Changes]]]
"""Returns by step what an episode leaves that does what the known solution does, or nothing."""


async def write_solution(task: GradedTask, is_gold: bool) -> list[Changes]:
    """Return a known solution that is files: what an agent leaves that writes them."""
    hidden = [task.hidden, *task.hidden.steps]
    if not is_gold:
        return [Changes() for _ in hidden]
    return [Changes(files=one.gold_contents, states=one.gold_states) for one in hidden]


async def check_candidate(
    candidate: TaskCandidate, grade: Grade, repeats: int = REPEATS, *, solve: Solve = write_solution
) -> None:
    """Demand that the null patch fails and the known solution passes, each time, in all its steps.

    Each run is a fresh machine with a hash seed and a clock of its own. What is graded is what an
    episode's machine would hand on.

    Raises:
        TaskRejectedError: A gate is closed; the detail says which.

    """
    task = GradedTask(task=candidate.task, hidden=candidate.hidden)
    null: list[SuiteReport] = []
    gold: list[SuiteReport] = []
    for _ in range(repeats):
        null.append(await _grade(task, grade, await solve(task, False)))
        check_reports(task.task.task_id, null, gold)
        gold.append(await _grade(task, grade, await solve(task, True), is_gold=True))
        check_reports(task.task.task_id, null, gold)


async def _grade(
    task: GradedTask, grade: Grade, left: Sequence[Changes], *, is_gold: bool = False
) -> SuiteReport:
    """Grade each step; of several, those are counted that decide a whole reward."""
    steps = [task.at_step(step) for step in range(len(task.task.steps) + 1)]
    reports = [
        await grade(each.task, each.hidden, changes)
        for each, changes in zip(steps, left, strict=True)
    ]
    if len(reports) == 1:
        return reports[0]
    if task.hidden.is_last_step_all and not is_gold:
        reports = reports[-1:]
    num_passed = sum(report.is_solved for report in reports)
    is_solved = num_passed == len(reports)
    output = next((report.output for report in reports if not report.is_solved), "")
    return SuiteReport(
        num_passed=num_passed, num_tests=len(reports), is_solved=is_solved, output=output
    )


def check_reports(task_id: str, null: Sequence[SuiteReport], gold: Sequence[SuiteReport]) -> None:
    """Compare the runs of one task that were made by now.

    Args:
        task_id: Of the task.
        null: Runs without a patch.
        gold: Runs with the known solution.

    Raises:
        TaskRejectedError: A gate is closed.

    """
    if null and null[0].is_solved:
        raise TaskRejectedError(Rejection.NULL_PASSES, task_id)
    if gold and not gold[0].is_solved:
        passed = f"{gold[0].num_passed} of {gold[0].num_tests} tests pass"
        said = f"; the verifier said: {gold[0].output}" if gold[0].output else ""
        raise TaskRejectedError(Rejection.GOLD_FAILS, f"{task_id}: {passed}{said}")
    if any(len({report.result for report in runs}) > 1 for runs in (null, gold)):
        raise TaskRejectedError(Rejection.FLAKY, f"{task_id}: {null} {gold}")
