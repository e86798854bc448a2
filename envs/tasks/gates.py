"""The gates: what no task enters a task set without."""

from collections.abc import Sequence
from typing import Protocol

from penstock.envs.tasks.report import SuiteReport
from penstock.envs.tasks.source import Rejection, TaskCandidate, TaskRejectedError
from penstock.messages.task import HiddenTests, Task

REPEATS = 2


class Grader(Protocol):
    """Runs hidden tests in a fresh machine."""

    async def grade(self, task: Task, hidden: HiddenTests, changes: dict[str, str]) -> SuiteReport:
        """Grade the task's files with some changed."""
        ...


async def check_candidate(candidate: TaskCandidate, grader: Grader, repeats: int = REPEATS) -> None:
    """Demand that the null patch fails and the known solution passes, each time.

    Each run is a fresh machine with a hash seed and a clock of its own.

    Raises:
        TaskRejectedError: A gate is closed; the detail says which.

    """
    task, hidden = candidate.task, candidate.hidden
    null: list[SuiteReport] = []
    gold: list[SuiteReport] = []
    for _ in range(repeats):
        null.append(await grader.grade(task, hidden, {}))
        check_reports(task.task_id, null, gold)
        gold.append(await grader.grade(task, hidden, hidden.gold_files))
        check_reports(task.task_id, null, gold)


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
        raise TaskRejectedError(Rejection.GOLD_FAILS, f"{task_id}: {passed}")
    if len(set(null)) > 1 or len(set(gold)) > 1:
        raise TaskRejectedError(Rejection.FLAKY, f"{task_id}: {null} {gold}")
