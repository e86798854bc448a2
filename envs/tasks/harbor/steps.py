"""A Harbor task of several steps, in: instructions, files and verifiers below `steps/<name>`.

```
 steps/<name>/instruction.md   what the agent is asked once the step before has ended
              workdir/          laid over the working directory before; setup.sh of it runs there
              tests/            over the task's own `tests`, for this step's verifier
              solution/         else the task's own
```
The gates run the known solutions one after the other in one machine, as an episode's steps are.

Source: `MultiStepTrial` and `TaskPaths` of Harbor 0.25.0.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from penstock.envs.tasks.harbor.folder import (
    BYTES_MAX,
    MalformedTaskError,
    Tree,
    read_instruction,
    read_tree,
    split_tree,
)
from penstock.envs.tasks.harbor.foreign import Verifier, foreign_hidden
from penstock.envs.tasks.harbor.schema import HarborFields
from penstock.envs.tasks.workspace import SETUP_FILE
from penstock.messages.task import HiddenTests, TaskStep

STEPS, WORKDIR, TEST_FILE = "steps", "workdir", "test.sh"
INSTRUCTION_FILE = "instruction.md"
HIDDEN_BYTES_MAX = 4 * BYTES_MAX
"""Of all steps' tests and solutions together: each step has the solutions before it again."""


def read_steps(folder: Path, fields: HarborFields) -> list[TaskStep]:
    """Read what the agent finds in each step; a task without steps is one.

    Raises:
        MalformedTaskError: A part is missing or malformed.

    """
    if not fields.steps:
        return [TaskStep(instruction=read_instruction(folder, INSTRUCTION_FILE))]
    steps: list[TaskStep] = []
    left = BYTES_MAX
    for each in fields.steps:
        steps.append(step := _read_step(folder, f"{STEPS}/{each.name}"))
        left -= len(step.instruction.encode()) + _num_bytes(step.contents)
        if left < 0:
            text = f"expected at most {BYTES_MAX} bytes of instructions and files together"
            raise MalformedTaskError(f"{folder / STEPS}: {text}")
    return steps


def check_paths(folder: Path, written: Iterable[Iterable[str]]) -> None:
    """Refuse a path that is a file in one step and a folder in another: no episode reaches both.

    Args:
        folder: Of the task.
        written: The paths that each step writes, those that the task begins with in the first.

    Raises:
        MalformedTaskError: There is one; the text names it.

    """
    files: set[PurePosixPath] = set()
    folders: set[PurePosixPath] = set()
    for number, paths in enumerate(written):
        for path in map(PurePosixPath, paths):
            files.add(path)
            folders.update(path.parents)
            if path in folders or not files.isdisjoint(path.parents):
                text = "expected no file where another step has a folder"
                raise MalformedTaskError(f"{folder}: steps[{number}]: {path}: {text}")


def read_step_tests(
    folder: Path, task_id: str, fields: HarborFields, verifier: Verifier
) -> HiddenTests:
    """Read what grades each step, the first one's with the others in it.

    Args:
        folder: Of the task.
        task_id: Of the task.
        fields: Of its settings.
        verifier: As the task's own settings have it; a step's own take their place.

    Raises:
        MalformedTaskError: See `read_steps`.
        HarborFieldError: A step's field has a wrong value.

    """
    steps: list[HiddenTests] = []
    left = HIDDEN_BYTES_MAX
    for number in range(len(fields.steps or [])):
        steps.append(hidden := _hidden(folder, task_id, fields, number, verifier))
        left -= _num_bytes(hidden.contents) + _num_bytes(hidden.gold_contents)
        if left < 0:
            text = f"expected at most {HIDDEN_BYTES_MAX} bytes of tests and solutions together"
            raise MalformedTaskError(f"{folder / STEPS}: {text}")
    is_last_all = fields.multi_step_reward_strategy == "final"
    return msgspec.structs.replace(steps[0], steps=steps[1:], is_last_step_all=is_last_all)


def _read_step(folder: Path, below: str) -> TaskStep:
    tree = _tree(folder, f"{below}/{WORKDIR}")
    parts = split_tree(tree)
    return TaskStep(
        instruction=read_instruction(folder, f"{below}/{INSTRUCTION_FILE}"),
        files=parts.files,
        binaries=parts.binaries,
        states=parts.states,
        has_setup=SETUP_FILE in tree,
    )


def _hidden(
    folder: Path, task_id: str, fields: HarborFields, number: int, verifier: Verifier
) -> HiddenTests:
    steps = fields.steps or []
    below = f"{STEPS}/{steps[number].name}"
    tests = _tree(folder, "tests") | _tree(folder, f"{below}/tests")
    if TEST_FILE not in tests:
        raise MalformedTaskError(
            f"{folder / below}/tests/{TEST_FILE}: expected it, or tests/{TEST_FILE}"
        )
    own = msgspec.structs.replace(
        verifier,
        env=verifier.env | steps[number].verifier.env,
        timeout_s=fields.step_verifier_s(number),
    )
    solution = _tree(folder, f"{below}/solution") or _tree(folder, "solution")
    hidden = foreign_hidden(task_id, tests, solution, own)
    return msgspec.structs.replace(hidden, min_reward=fields.min_reward(number))


def _tree(folder: Path, below: str) -> Tree:
    """Return what a folder holds, nothing where there is none; what is no folder is refused."""
    return read_tree(folder, below) if os.path.lexists(folder / below) else {}


def _num_bytes(files: Mapping[str, bytes]) -> int:
    return sum(map(len, files.values()))
