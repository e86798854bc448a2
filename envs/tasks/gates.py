"""The gates: what no task enters a task set without."""

from typing import Protocol

from penstock.envs.tasks.report import SuiteReport
from penstock.envs.tasks.source import Candidate, Rejection, TaskRejectedError
from penstock.messages.task import HiddenTests, Task

REPEATS = 2


class Grader(Protocol):
    """Runs hidden tests in a fresh machine."""

    async def grade(self, task: Task, hidden: HiddenTests, changes: dict[str, str]) -> SuiteReport:
        """Grade the task's files with some changed."""
        ...


async def check_candidate(candidate: Candidate, grader: Grader, repeats: int = REPEATS) -> None:
    """Demand that the null patch fails and the known solution passes, each time.

    Each run is a fresh machine with a hash seed and a clock of its own.

    Raises:
        TaskRejectedError: A gate is closed; the detail says which.

    """
    task, hidden = candidate.task, candidate.hidden
    null, gold = [], []
    for number in range(repeats):
        null.append(await grader.grade(task, hidden, {}))
        if null[-1].is_solved and number == 0:
            raise TaskRejectedError(Rejection.NULL_PASSES, task.task_id)
        gold.append(await grader.grade(task, hidden, hidden.gold_files))
        if not gold[-1].is_solved and number == 0:
            detail = f"{task.task_id}: {gold[-1].num_passed} of {gold[-1].num_tests} tests pass"
            raise TaskRejectedError(Rejection.GOLD_FAILS, detail)
    if any(report != null[0] for report in null) or any(report != gold[0] for report in gold):
        raise TaskRejectedError(Rejection.FLAKY, f"{task.task_id}: {null} {gold}")
