"""One task: a repository of short files with one bug, its visible check and its hidden tests."""

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.envs.ladder.function import BODY, CallCase, Function, mutate, sites
from penstock.envs.ladder.names import NOUNS
from penstock.messages.task import HiddenTests, Limits, Split, Task

SEARCH = "search"
"""The category on which the instruction does not name the file."""
CHECK_FILE = "check.py"
CHECK_COMMAND = f"python3 {CHECK_FILE}"
HIDDEN_FILE = "_hidden.py"
LIMITS = Limits(num_turns_max=8, num_tokens_max=512, turn_tokens_max=96)

_PIECE = re.compile(r"\n[ ]*| ?\w+| ?[<>=!*/+-]+| ?[^\w\s]|[ ]+")
_NEIGHBORS_MAX = 4
_BESIDE = 0.25
"""Probability that the file with the bug holds another function."""
_DRAWS_MAX = 8
_MISSING = "raise NotImplementedError"
_WINDOWS = sorted(
    itertools.product(range(_NEIGHBORS_MAX + 1), repeat=2), key=lambda sides: (sum(sides), sides)
)
"""Pieces to take on the left and on the right, few first."""
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
results = []
for arguments in {cases}:
    try:
        from {module} import {function} as f
        results.append(repr(f(*arguments)))
    except Exception as error:
        results.append("raised " + type(error).__name__)
print("\\n".join(results))
"""


@dataclass(frozen=True)
class RepositorySpec:
    """What the generator decided: a function, its bug and its place."""

    function: Function
    site: str
    split: Split
    category: str


@dataclass(frozen=True)
class ShortEdit:
    """What an `edit_file` call takes: a text that is there once, and its replacement."""

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
    bug: str
    """Source of the wrong function."""
    gold: str
    """Source of the right one."""
    gold_edit: ShortEdit

    def wrong_edit(self, rng: random.Random) -> ShortEdit | None:
        """Draw another well-formed edit of the wrong function: what a poor attempt might do.

        It makes one bug more, or, where the body is missing, writes a body with a bug.
        """
        base = self.gold if self.gold_edit.old.strip() == _MISSING else self.bug
        places = sites(base)
        for _ in range(_DRAWS_MAX if places else 0):
            source = mutate(base, rng.choice(places))
            edit = short_edit(self.bug, source, self.task.files[self.path])
            if source != self.gold and edit:
                return edit
        return None


def build_repository(
    draft: RepositorySpec, others: list[Function], task_id: str, rng: random.Random
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
    bug = mutate(gold, draft.site)
    around = [o.render(*o.draw_names(rng, heldout=heldout)) for o in others]
    beside = [around.pop(0)] if rng.random() < _BESIDE else []
    position = rng.randint(0, len(beside))
    path = f"{nouns[0]}.py"

    def text(source: str) -> str:
        return "\n\n".join([*beside[:position], source, *beside[position:]]) + "\n"

    gold_edit = short_edit(bug, gold, text(bug))
    is_alone = not any(f"def {function_name}(" in other for other in [*around, *beside])
    if gold_edit is None or not is_alone:
        return None
    files = {path: text(bug)}
    files |= {f"{noun}.py": f"{source}\n" for noun, source in zip(nouns[1:], around, strict=False)}
    visible = _visible_cases(draft, rng)
    pairs = [(case.arguments, case.expected) for case in visible]
    files[CHECK_FILE] = _program(_CHECK, path, function_name, pairs)
    hidden_cases = draft.function.hidden_cases(rng)
    return Repository(
        task=Task(
            task_id=task_id,
            category=draft.category,
            split=draft.split,
            instruction=_instruction(function_name, path, draft),
            files=dict(sorted(files.items())),
            limits=LIMITS,
        ),
        hidden=_hidden_tests(task_id, path, function_name, hidden_cases, text(gold)),
        function_name=function_name,
        path=path,
        bug=bug,
        gold=gold,
        gold_edit=gold_edit,
    )


def short_edit(before: str, after: str, text: str) -> ShortEdit | None:
    """Return the shortest edit that turns `before` into `after` and is there once in `text`.

    It covers whole pieces (a word, a number, an operator, with the space before it) and takes as
    few of the neighbors as uniqueness needs.

    Returns:
        None where nothing differs or no such edit is short.

    """
    old, new = _PIECE.findall(before), _PIECE.findall(after)
    start = _num_common(old, new)
    rest_old, rest_new = old[start:], new[start:]
    end = _num_common(rest_old[::-1], rest_new[::-1])
    if not rest_old[: len(rest_old) - end] and not rest_new[: len(rest_new) - end]:
        return None
    for left, right in _WINDOWS:
        first, last = max(0, start - left), end - min(right, end)
        removed = "".join(old[first : len(old) - last])
        if removed.strip() and text.count(removed) == 1:
            return ShortEdit(removed, "".join(new[first : len(new) - last]))
    return None


def _num_common(left: list[str], right: list[str]) -> int:
    """Return how many leading pieces are the same."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _instruction(function_name: str, path: str, draft: RepositorySpec) -> str:
    verb = "Write" if draft.site == BODY else "Fix"
    where = "" if draft.category == SEARCH else f" in {path}"
    return f"{verb} {function_name}{where}"


def _visible_cases(draft: RepositorySpec, rng: random.Random) -> list[CallCase]:
    cases = draft.function.cases
    return [cases[rng.choice(draft.function.killers[draft.site])], rng.choice(cases)]


def _hidden_tests(
    task_id: str, path: str, function_name: str, cases: list[CallCase], gold_text: str
) -> HiddenTests:
    return HiddenTests(
        task_id=task_id,
        files={HIDDEN_FILE: hidden_program(path, function_name, cases)},
        argv=["python3", "-I", "-S", HIDDEN_FILE],
        expected=[case.expected for case in cases],
        gold_files={path: gold_text},
    )


def hidden_program(path: str, function_name: str, cases: Sequence[CallCase]) -> str:
    """Return the program that prints the result of each call, one per line at its end.

    It has the calls and not what they must return: that only the judge knows.
    """
    return _program(_HIDDEN, path, function_name, [case.arguments for case in cases])


def _program(text: str, path: str, function_name: str, cases: Sequence[object]) -> str:
    return text.format(module=path.removesuffix(".py"), function=function_name, cases=cases)
