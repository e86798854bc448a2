"""Turns a tried change into a task: instruction, hidden tests, and origin."""

import random
from collections.abc import Sequence

from penstock.envs.factory.modules import Module
from penstock.envs.factory.recording import ARGV, PROGRAM_FILE, Recording, TriedChange, program
from penstock.envs.factory.targets import Target
from penstock.envs.tasks.source import TaskCandidate, TaskOrigin
from penstock.messages.task import HiddenTests, Limits, Split, Task

FEATURE = "feature"
BUG = "bug"
LIMITS = Limits(num_turns_max=24, num_tokens_max=32_768, turn_tokens_max=2_048, wall_s_max=600.0,
                tool_s_max=30.0, output_bytes_max=16_384)  # fmt: skip
_HIDDEN_MAX = 16
_HIDDEN_RIGHT_MIN = 4
"""Minimum hidden calls that the bug does not affect, if there are as many."""
_SHOWN = 2
_GRADE_S_MAX = 20.0


def write_candidate(  # noqa: PLR0913 - all that a task is made of
    source_name: str,
    *,
    module: Module,
    target: Target,
    files: dict[str, str],
    recording: Recording,
    tried: TriedChange,
    rng: random.Random,
) -> TaskCandidate:
    """Return the task of one change."""
    shown, hidden = _divide(tried, len(recording.calls), rng)
    kind = FEATURE if tried.kind == FEATURE else BUG
    hint = rng.choice(HINTS) if kind == BUG else "function"
    write = feature_instruction if kind == FEATURE else bug_instruction
    examples = [(recording.calls[index], recording.lines[index]) for index in shown]
    task_id = f"{module.name}.{target.qualname}.{tried.kind}"
    task = Task(
        task_id=task_id,
        category=kind,
        split=Split.TRAIN,
        instruction=write(target, module.file, hint, examples),
        files=files | {module.file: tried.source},
        limits=LIMITS,
    )
    calls = [recording.calls[index] for index in hidden]
    tests = HiddenTests(
        task_id=task_id,
        files={PROGRAM_FILE: program(module.name, calls)},
        argv=ARGV,
        expected=[recording.lines[index] for index in hidden],
        gold_files={module.file: files[module.file]},
        timeout_s=_GRADE_S_MAX,
        # The machine has an unchanged copy of the standard library.
        sealed_modules=[module.name.removeprefix(f"{module.prefix}.")] if module.prefix else [],
    )
    origin = TaskOrigin(
        source=source_name,
        repository=module.repository,
        kind=kind,
        function=target.qualname,
        path=module.file,
        digest=target.digest,
        change=tried.kind,
        num_lines=target.num_lines,
        num_files=len(files),
        num_cases_failed=len(set(tried.failed) & set(hidden)),
        num_cases=len(hidden),
        hint=hint,
    )
    return TaskCandidate(task=task, hidden=tests, origin=origin)


def _divide(tried: TriedChange, num: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return the indexes of shown and of hidden calls, which are disjoint.

    One failing call is shown, unless it is the only one; other shown calls are unaffected.
    """
    failed = rng.sample(tried.failed, len(tried.failed))
    right = [index for index in range(num) if index not in tried.failed]
    rng.shuffle(right)
    num_failing = 1 if len(failed) > 1 else 0
    shown = failed[:num_failing] + right[: _SHOWN - num_failing]
    # Without unaffected calls, failing ones are the only examples.
    if not right and len(failed) > _SHOWN:
        shown = failed[:_SHOWN]
    rest_failed = [index for index in failed if index not in shown]
    rest_right = [index for index in right if index not in shown]
    # Some unaffected calls stay hidden tests, so that a fix must not break them.
    num_right = min(len(rest_right), max(_HIDDEN_RIGHT_MIN, _HIDDEN_MAX - len(rest_failed)))
    hidden = rest_failed[: _HIDDEN_MAX - num_right] + rest_right[:num_right]
    return sorted(shown), sorted(hidden)


HINTS = ("function", "module", "symptom")


def bug_instruction(
    target: Target, path: str, hint: str, examples: Sequence[tuple[str, str]]
) -> str:
    """Describe a bug.

    Args:
        hint: One of `HINTS`, how precisely to name the place.

    """
    where = {
        "function": f"`{target.qualname}` in `{path}` gives wrong results for some inputs.",
        "module": f"Something in `{path}` gives wrong results for some inputs.",
        "symptom": "Some calls into this repository give wrong results.",
    }[hint]
    return f"{where} Find the bug and fix it where it is.\n\n{_examples(examples)}"


def feature_instruction(
    target: Target, path: str, hint: str, examples: Sequence[tuple[str, str]]
) -> str:
    """Ask for a function's missing body."""
    return (
        f"`{target.qualname}` in `{path}` has no body. Write it as its docstring says.\n\n"
        f"{_examples(examples)}"
    )


def commit_instruction(subject: str, tests: Sequence[str]) -> str:
    """Ask for the change of a commit."""
    names = ", ".join(f"`{name}`" for name in tests)
    return f"{subject}\n\nTests that will be run: {names}. They are not in the repository yet."


def _examples(examples: Sequence[tuple[str, str]]) -> str:
    if not examples:
        return "Other calls must go on giving what they give."
    rows = "\n".join(f"    {call}\n    must give: {line}" for call, line in examples)
    return f"For example:\n\n{rows}\n"
