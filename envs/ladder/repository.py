"""One task: a repository of short files with one bug, its visible check and its hidden tests."""

import random
from dataclasses import dataclass

from penstock.envs.ladder.function import Case, Function
from penstock.envs.ladder.mutate import BODY, mutations
from penstock.envs.ladder.names import NOUNS
from penstock.messages.task import HiddenTests, Limits, Split, Task

SEARCH = "search"
"""The rung on which the instruction does not name the file."""
CHECK_FILE = "check.py"
CHECK_COMMAND = f"python3 {CHECK_FILE}"
HIDDEN_FILE = "_hidden.py"
LIMITS = Limits(num_turns_max=8, num_tokens_max=512, turn_tokens_max=96)

_CHECK = """\
for arguments, expected in {cases}:
    try:
        from {module} import {function} as f
        result = repr(f(*arguments))
    except Exception as error:
        result = type(error).__name__
    if result != expected:
        print("fail:", result, "not", expected)
        raise SystemExit(1)
print("ok")
"""
_HIDDEN = """\
import sys
sys.path.insert(0, ".")
CASES = {cases}
passed = 0
for arguments, expected in CASES:
    try:
        from {module} import {function} as f
        passed += repr(f(*arguments)) == expected
    except Exception:
        pass
print("passed", passed, "of", len(CASES))
assert passed == len(CASES)
"""


@dataclass(frozen=True)
class Draft:
    """What the generator decided: a function, its bug and its place."""

    function: Function
    site: str
    split: Split
    rung: str


@dataclass(frozen=True)
class LineEdit:
    """What an `edit_file` call takes: text that is there once, and its replacement."""

    old: str
    new: str


@dataclass(frozen=True)
class Repository:
    """A task with what demonstrations must know of it."""

    task: Task
    hidden: HiddenTests
    function_name: str
    path: str
    """File with the bug."""
    gold_edit: LineEdit
    wrong_edits: tuple[LineEdit, ...]
    """Other well-formed edits of the wrong function: what a poor attempt might do."""


def build_repository(
    draft: Draft, others: list[Function], task_id: str, rng: random.Random
) -> Repository | None:
    """Write the files of a task.

    Args:
        others: correct functions to put around the wrong one: the first beside it if `rng` says
            so, each other one in a file of its own.

    Returns:
        None if the wrong line is not unique in its file, so that no short edit could fix it, or
        if another function has the same name.

    """
    nouns = rng.sample(NOUNS, len(others) + 1)
    heldout = draft.split is Split.HELDOUT
    function_name, names = draft.function.draw_names(rng, heldout=heldout)
    gold = draft.function.render(function_name, names)
    bugs = {mutation.site: mutation for mutation in mutations(gold)}
    around = [o.render(*o.draw_names(rng, heldout=heldout)) for o in others]
    beside = [around.pop(0)] if rng.random() < 0.4 else []
    position = rng.randint(0, len(beside))
    path = f"{nouns[0]}.py"

    def text(source: str) -> str:
        return "\n\n".join([*beside[:position], source, *beside[position:]]) + "\n"

    bug = bugs[draft.site].source
    gold_edit = line_edit(bug, gold)
    is_alone = not any(f"def {function_name}(" in other for other in [*around, *beside])
    if gold_edit is None or not is_alone or text(bug).count(gold_edit.old) != 1:
        return None
    files = {path: text(bug)}
    files |= {f"{noun}.py": f"{source}\n" for noun, source in zip(nouns[1:], around, strict=False)}
    visible = _visible_cases(draft, rng)
    files[CHECK_FILE] = _program(_CHECK, path, function_name, visible)
    hidden_cases = draft.function.hidden_cases(rng)
    return Repository(
        task=Task(
            task_id=task_id,
            rung=draft.rung,
            split=draft.split,
            instruction=_instruction(function_name, path, draft),
            files=dict(sorted(files.items())),
            limits=LIMITS,
        ),
        hidden=HiddenTests(
            task_id=task_id,
            files={HIDDEN_FILE: _program(_HIDDEN, path, function_name, hidden_cases)},
            argv=["python3", "-I", "-S", HIDDEN_FILE],
            gold_files={path: text(gold)},
        ),
        function_name=function_name,
        path=path,
        gold_edit=gold_edit,
        wrong_edits=_wrong_edits(bug, gold, text(bug), is_body=draft.site == BODY),
    )


def line_edit(before: str, after: str) -> LineEdit | None:
    """Return the edit of the one run of whole lines that differs, without its first indentation.

    None where nothing differs or where lines were only added.
    """
    old, new = before.splitlines(), after.splitlines()
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    removed = "\n".join(old[start : len(old) - end]).lstrip()
    added = "\n".join(new[start : len(new) - end]).lstrip()
    return LineEdit(removed, added) if removed and added else None


def _wrong_edits(bug: str, gold: str, text: str, *, is_body: bool) -> tuple[LineEdit, ...]:
    """Return one-bug edits of the wrong function, or wrong bodies where there is none."""
    targets = mutations(gold if is_body else bug)[:-1]
    edits = [line_edit(bug, mutation.source) for mutation in targets if mutation.source != gold]
    return tuple(edit for edit in edits if edit and text.count(edit.old) == 1)


def _instruction(function_name: str, path: str, draft: Draft) -> str:
    verb = "Write" if draft.site == BODY else "Fix"
    where = "" if draft.rung == SEARCH else f" in {path}"
    return f"{verb} {function_name}{where}"


def _visible_cases(draft: Draft, rng: random.Random) -> list[Case]:
    cases = draft.function.cases
    return [cases[rng.choice(draft.function.killers[draft.site])], rng.choice(cases)]


def _program(text: str, path: str, function_name: str, cases: list[Case]) -> str:
    pairs = [(case.arguments, case.expected) for case in cases]
    return text.format(module=path.removesuffix(".py"), function=function_name, cases=pairs)
