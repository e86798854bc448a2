"""The judge reads what the ladder's own hidden tests print."""

import random

import pytest

from penstock.envs.tasks.gates import read_report
from penstock.examples.quickstart.ladder.dry_run import run_program
from penstock.examples.quickstart.ladder.generate import Selection, draw_repositories
from penstock.examples.quickstart.ladder.repository import Repository
from penstock.messages.sandbox import ExecResult
from penstock.messages.task import Split

REPOSITORIES = list(draw_repositories(Split.TRAIN, 8, Selection(), random.Random(0), "t"))


@pytest.mark.parametrize("repository", REPOSITORIES, ids=lambda one: one.task.task_id)
def test_the_known_solution_is_solved_and_the_task_as_given_is_not(repository: Repository) -> None:
    hidden = repository.hidden
    for changes, is_solved in (({}, False), (hidden.gold_files, True)):
        files = repository.task.files | changes | hidden.files
        exit_code, output = run_program(files, hidden.argv[-1])
        done = ExecResult(exit_code=exit_code, stdout=output.encode())
        report = read_report(done, hidden.expected)
        assert report.num_tests > 0
        assert report.is_solved == is_solved
