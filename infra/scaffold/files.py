"""The files of a new project; `own.py` holds all four parts."""

CONFIG = """\
# penstock run --config config.toml     (base.toml is the quickstart's configuration)
base = "base.toml"

[pacer]
harness = "own:TOOLS"        # the agents' tools

[judge]
judge = "own:OwnJudge"       # what decides whether a rollout solved its task

[trainer.loss]
name = "own:loss"            # what a step minimizes

[[prepare.sources]]          # tasks: the quickstart's, and our own
name = "ladder"
kind = "ladder"

[[prepare.sources]]
name = "own"
kind = "own"
make = "own:tasks"
"""

OWN = '''\
"""The parts of our own that config.toml names."""

from collections.abc import Iterator

import penstock


READ_FILE = penstock.tools("1")["read_file"]


async def count_lines(toolbox: penstock.Toolbox, arguments: dict[str, object]) -> str:
    """Count the lines of a file; what is no text file is an invalid call, as for read_file."""
    text = await READ_FILE.run(toolbox, arguments)
    return str(len(text.splitlines()))


PATH = penstock.Argument("relative to the repository", bound_min=1, bound_max=255)
TOOLS = {
    **penstock.tools("1"),
    "count_lines": penstock.ToolSpec(count_lines, "Count the lines of a file.", {"path": PATH}),
}


class OwnJudge:
    """The hidden tests decide, and a solution must also have changed few files."""

    version = "1"
    num_files_max = 3

    def __init__(self, config: penstock.JudgeConfig) -> None:
        """Take the settings of `[judge]`."""
        self._tests = penstock.HiddenTestsJudge(config)

    async def judge(
        self, rollout: penstock.Trajectory, task: penstock.GradedTask, ctx: penstock.Context
    ) -> penstock.Findings:
        """Grade one rollout."""
        found = await self._tests.judge(rollout, task, ctx)
        return self.limited(found, len(rollout.files))

    def limited(self, found: penstock.Findings, num_files: int) -> penstock.Findings:
        """Return the findings, failed where too many files were changed."""
        if found.outcome is not penstock.Outcome.SOLVED or num_files <= self.num_files_max:
            return found
        detail = f"changed {num_files} files, at most {self.num_files_max}"
        return penstock.Findings(outcome=penstock.Outcome.FAILED, detail=detail)


def tasks(seed: int) -> Iterator[penstock.TaskCandidate]:
    """Return tasks: a function that is wrong, and hidden tests that show it."""
    for number in range(8):
        name, wanted = f"add_{seed}_{number}", number + 2
        wrong = f"def {name}(value):\\n    return value + {wanted - 1}\\n"
        test = f"from {name} import {name}\\nprint({name}(1))\\nprint({name}(10))\\n"
        yield penstock.TaskCandidate(
            task=penstock.Task(
                task_id=name,
                category="own",
                split=penstock.Split.HELDOUT if number % 4 == 0 else penstock.Split.TRAIN,
                instruction=f"{name} in {name}.py should add {wanted}. Fix it.",
                files={f"{name}.py": wrong},
            ),
            hidden=penstock.HiddenTests(
                task_id=name,
                files={"check.py": test},
                argv=["python3", "check.py"],
                expected=[str(1 + wanted), str(10 + wanted)],
                gold_files={f"{name}.py": wrong.replace(str(wanted - 1), str(wanted))},
            ),
            origin=penstock.TaskOrigin(source="own", repository=name, kind="bug"),
        )


def bounded_reinforce(
    tokens: penstock.LossTokens, config: penstock.LossConfig
) -> penstock.TokenLosses:
    """REINFORCE whose advantages are bounded: -w clip(A) log pi."""
    advantages = tokens.advantages.clamp(-2.0, 2.0)
    values = -tokens.weights * advantages * tokens.current
    return penstock.TokenLosses(values=values, is_clipped=advantages != tokens.advantages)


loss = penstock.LossSpec(bounded_reinforce, ratio_against=None)
'''

TEST = '''\
"""The parts of our own, without a run: `python -m pytest`."""

import asyncio

import own
import penstock
import torch


class Box:
    """A machine with one file."""

    sandbox = property(lambda self: self)
    pages = ()

    async def read_file(self, path, bytes_max):
        return b"one\\ntwo\\n"


def test_the_tool_counts_lines():
    assert asyncio.run(own.TOOLS["count_lines"].run(Box(), {"path": "a.py"})) == "2"


def test_too_many_files_are_no_solution():
    judge = own.OwnJudge(penstock.JudgeConfig())
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
    )
    found = own.loss.fn(tokens, penstock.LossConfig(name="own:loss"))
    found.values.sum().backward()
    assert current.grad.tolist() == [-2.0, 1.0]
    assert found.is_clipped.tolist() == [True, False]
'''

README = """\
# A project on Penstock

`own.py` holds a tool, a judge, tasks and a loss; `config.toml` names them as `own:NAME`.

    python -m pytest                          # the parts alone, in seconds (pip install pytest)
    penstock run --config config.toml         # from this folder, so that own.py is found
    penstock status; penstock replay
"""
