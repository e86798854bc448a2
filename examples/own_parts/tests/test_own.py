"""The parts of our own, without a run: `python -m pytest`."""

import asyncio
from typing import Any

import own
import torch

import penstock


class Box:
    """A machine with one file."""

    sandbox = property(lambda self: self)
    pages = ()

    async def read_file(self, path, bytes_max):
        return b"one\ntwo\n"


def test_the_tools_number_and_count_lines():
    async def result(name):
        box: Any = Box()
        return await own.TOOLS[name].run(box, {"path": "a.py"})

    assert asyncio.run(result("read_file")) == "  1 one\n  2 two\n"
    assert asyncio.run(result("count_lines")) == "2"


def test_too_many_files_are_no_solution():
    judge = own.FewFiles(penstock.JudgeConfig())
    solved = penstock.Findings(outcome=penstock.Outcome.SOLVED)
    assert judge.limited(solved, 2) is solved
    assert judge.limited(solved, 9).outcome is penstock.Outcome.FAILED


def test_tasks_are_of_both_splits_and_their_solutions_differ():
    made = list(own.tasks(0))
    assert {one.task.split for one in made} == {"train", "heldout"}
    assert all(one.task.files != one.hidden.gold_files for one in made)


def test_the_loss_has_a_gradient():
    current = torch.tensor([-1.0, -2.0], requires_grad=True)
    rest = {"proximal": current.detach(), "behavior": current.detach()}
    tokens = penstock.LossTokens(
        current=current, advantages=torch.tensor([5.0, -1.0]), weights=torch.ones(2),
        sequence_ids=torch.zeros(2, dtype=torch.int64), **rest,
    )  # fmt: skip
    found = own.clipped(tokens, penstock.LossConfig())
    found.values.sum().backward()
    assert current.grad is not None and current.grad.tolist() == [-2.0, 1.0]
    assert found.is_clipped.tolist() == [True, False]
