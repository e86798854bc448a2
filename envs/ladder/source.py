"""The quickstart's ladder as a source of the factory."""

import random
from collections.abc import Iterator

from penstock.envs.ladder.dry_run import run_program
from penstock.envs.ladder.generate import Selection, draw_repositories
from penstock.envs.ladder.repository import HIDDEN_FILE, Repository
from penstock.envs.tasks.gates import REPEATS, SuiteReport, check_reports, read_report
from penstock.envs.tasks.source import Lab, TaskCandidate, TaskOrigin, TaskPlan
from penstock.messages.sandbox import ExecResult
from penstock.messages.task import HiddenTests, Split


class LadderSource:
    """Tasks of the ladder, the same for the same arguments, for ever.

    Args:
        split: training or held out.
        num: how many.
        selection: categories and families.
        rng: decides everything.
        prefix: of the task ids.

    """

    name = "ladder"

    def __init__(
        self, split: Split, num: int, selection: Selection, rng: random.Random, prefix: str
    ) -> None:
        self._repositories = draw_repositories(split, num, selection, rng, prefix)

    def plans(self) -> Iterator[TaskPlan]:
        """Yield one plan a task."""
        for repository in self._repositories:
            yield LadderPlan(repository)

    def candidates(self) -> Iterator[TaskCandidate]:
        """Yield the tasks that a run starts from, each through the factory's gates.

        They are run in this process: nobody but this project wrote their files.

        Raises:
            TaskRejectedError: A task fails its gates: a fault of the ladder.

        """
        for repository in self._repositories:
            candidate = to_candidate(repository)
            task, hidden = candidate.task, candidate.hidden
            null = [grade_here(task.files, hidden) for _ in range(REPEATS)]
            gold = [grade_here(task.files | hidden.gold_files, hidden) for _ in range(REPEATS)]
            check_reports(task.task_id, null, gold)
            yield candidate


class LadderPlan:
    """A repository that is there already."""

    def __init__(self, repository: Repository) -> None:
        self.name = repository.task.task_id
        self._repository = repository

    async def draft(self, lab: Lab) -> list[TaskCandidate]:
        """Return it."""
        return [to_candidate(self._repository)]


def grade_here(files: dict[str, str], hidden: HiddenTests) -> SuiteReport:
    """Run hidden tests in this process: for files that this project wrote, never a policy's."""
    exit_code, output = run_program(files | hidden.files, HIDDEN_FILE)
    return read_report(ExecResult(exit_code=exit_code, stdout=output.encode()), hidden.expected)


def to_candidate(repository: Repository) -> TaskCandidate:
    """Say of a ladder task where it comes from."""
    task = repository.task
    origin = TaskOrigin(
        source=LadderSource.name,
        repository=f"ladder/{task.task_id}",
        kind="feature" if task.category == "body" else "bug",
        function=repository.function_name,
        path=repository.path,
        digest=repository.function_name,
        change=task.category,
        num_lines=len(repository.gold.splitlines()),
        num_files=len(task.files),
        num_cases=len(repository.hidden.expected),
        hint="symptom" if task.category == "search" else "function",
    )
    return TaskCandidate(task=task, hidden=repository.hidden, origin=origin)
