"""One task: a repository of short files with a bug or two, its visible check, its hidden tests."""

import itertools
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock import HiddenTests, Limits, Split, Task

from .function import BODY, CallCase, Function, mutate, sites
from .names import NOUNS

SEARCH = "search"
"""The category on which the instruction does not name the file."""
PAIR = "pair"
"""The category with two bugs, each in a file of its own: neither needs to know of the other, so
both files can be read in one turn and edited in one turn."""
CHECK_FILE = "check.py"
CHECK_COMMAND = f"python3 {CHECK_FILE}"
HIDDEN_FILE = "_hidden.py"
LIMITS = Limits(num_turns_max=8, num_tokens_max=512, turn_tokens_max=96)

_PIECE = re.compile(r"\n[ ]*| ?\w+| ?[<>=!*/+-]+| ?[^\w\s]|[ ]+")
_NEIGHBORS_MAX = 4
_BESIDE = 0.25
"""Probability that the (first) file with a bug holds another function."""
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
"""
_CHECK_END = 'print("ok")\n'
_HIDDEN_START = """\
import sys
sys.path.insert(0, ".")
results = []
"""
_HIDDEN = """\
for arguments in {cases}:
    try:
        from {module} import {function} as f
        results.append(repr(f(*arguments)))
    except Exception as error:
        results.append("raised " + type(error).__name__)
"""
_HIDDEN_END = 'print("\\n".join(results))\n'


@dataclass(frozen=True)
class BugPlace:
    """A function, and which of its bugs it gets."""

    function: Function
    site: str


@dataclass(frozen=True)
class RepositorySpec:
    """What the generator decided: what is wrong, and the kind of task."""

    places: tuple[BugPlace, ...]
    split: Split
    category: str


@dataclass(frozen=True)
class ShortEdit:
    """What an `edit_file` call takes: a text that is there once, and its replacement."""

    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """One wrong function of a task."""

    function_name: str
    path: str
    text: str
    """Its file."""
    bug: str
    """Source of the wrong function."""
    gold: str
    """Source of the right one."""
    gold_text: str
    """Its file, put right."""
    gold_edit: ShortEdit

    def wrong_edit(self, rng: random.Random) -> ShortEdit | None:
        """Draw another well-formed edit of the wrong function: what a poor attempt might do.

        It makes one bug more, or, where the body is missing, writes a body with a bug.
        """
        base = self.gold if self.gold_edit.old.strip() == _MISSING else self.bug
        places = sites(base)
        for _ in range(_DRAWS_MAX if places else 0):
            source = mutate(base, rng.choice(places))
            edit = short_edit(self.bug, source, self.text)
            if source != self.gold and edit:
                return edit
        return None


@dataclass(frozen=True)
class Repository:
    """A task with what demonstrations must know of it."""

    task: Task
    hidden: HiddenTests
    faults: tuple[Fault, ...]


def build_repository(
    draft: RepositorySpec, others: list[Function], task_id: str, rng: random.Random
) -> Repository | None:
    """Write the files of a task.

    Args:
        others: correct functions to put around the wrong ones: the first beside the first of them
            if `rng` says so, each other one in a file of its own.

    Returns:
        None if a wrong line is not unique in its file, so that no short edit could fix it, or
        if two functions have the same name.

    """
    nouns = rng.sample(NOUNS, len(others) + len(draft.places))
    heldout = draft.split is Split.HELDOUT
    named = [(place, *place.function.draw_names(rng, heldout=heldout)) for place in draft.places]
    around = [o.render(*o.draw_names(rng, heldout=heldout)) for o in others]
    beside = [around.pop(0)] if rng.random() < _BESIDE else []
    position = rng.randint(0, len(beside))
    faults: list[Fault] = []
    for (place, name, names), noun in zip(named, nouns, strict=False):
        fault = _fault(place, name, names, f"{noun}.py", (beside[:position], beside[position:]))
        if fault is None:
            return None
        faults.append(fault)
        beside, position = [], 0
    texts = [*around, *(fault.text for fault in faults)]
    if any(sum(f"def {one.function_name}(" in text for text in texts) > 1 for one in faults):
        return None
    if any(fault.text.count(f"def {fault.function_name}(") > 1 for fault in faults):
        return None
    files = {fault.path: fault.text for fault in faults}
    free = nouns[len(faults) :]
    files |= {f"{noun}.py": f"{source}\n" for noun, source in zip(free, around, strict=False)}
    visible = [_visible_cases(place, rng) for place in draft.places]
    files[CHECK_FILE] = _check_program(faults, visible)
    hidden_cases = [place.function.hidden_cases(rng) for place in draft.places]
    return Repository(
        task=Task(
            task_id=task_id,
            category=draft.category,
            split=draft.split,
            instruction=_instruction(faults, draft),
            files=dict(sorted(files.items())),
            limits=LIMITS,
        ),
        hidden=_hidden_tests(task_id, faults, hidden_cases),
        faults=tuple(faults),
    )


def _fault(
    place: BugPlace,
    function_name: str,
    names: dict[str, str],
    path: str,
    beside: tuple[list[str], list[str]],
) -> Fault | None:
    """Write one wrong function between others of its file; None where no short edit fixes it."""
    gold = place.function.render(function_name, names)
    bug = mutate(gold, place.site)
    before, after = beside

    def text(source: str) -> str:
        return "\n\n".join([*before, source, *after]) + "\n"

    edit = short_edit(bug, gold, text(bug))
    if edit is None:
        return None
    return Fault(function_name, path, text(bug), bug, gold, text(gold), edit)


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


def _instruction(faults: Sequence[Fault], draft: RepositorySpec) -> str:
    verb = "Write" if draft.places[0].site == BODY else "Fix"
    if draft.category == SEARCH:
        return f"{verb} {faults[0].function_name}"
    return f"{verb} " + " and ".join(f"{one.function_name} in {one.path}" for one in faults)


def _visible_cases(place: BugPlace, rng: random.Random) -> list[CallCase]:
    cases = place.function.cases
    return [cases[rng.choice(place.function.killers[place.site])], rng.choice(cases)]


def _check_program(faults: Sequence[Fault], cases: Iterable[Sequence[CallCase]]) -> str:
    loops = [
        _loop(_CHECK, one.path, one.function_name, [(c.arguments, c.expected) for c in of_one])
        for one, of_one in zip(faults, cases, strict=True)
    ]
    return "".join([*loops, _CHECK_END])


def _hidden_tests(
    task_id: str, faults: Sequence[Fault], cases: Sequence[Sequence[CallCase]]
) -> HiddenTests:
    calls = [
        (one.path, one.function_name, of_one) for one, of_one in zip(faults, cases, strict=True)
    ]
    return HiddenTests(
        task_id=task_id,
        files={HIDDEN_FILE: hidden_program(calls)},
        argv=["python3", "-I", "-S", HIDDEN_FILE],
        expected=[case.expected for of_one in cases for case in of_one],
        gold_files={one.path: one.gold_text for one in faults},
    )


def hidden_program(calls: Iterable[tuple[str, str, Sequence[CallCase]]]) -> str:
    """Return the program that prints the result of each call, one per line at its end.

    It has the calls and not what they must return: that only the judge knows.

    Args:
        calls: path, function and calls of each function that is tested.

    """
    loops = [
        _loop(_HIDDEN, path, name, [case.arguments for case in cases])
        for path, name, cases in calls
    ]
    return "".join([_HIDDEN_START, *loops, _HIDDEN_END])


def _loop(text: str, path: str, function_name: str, cases: Sequence[object]) -> str:
    return text.format(module=path.removesuffix(".py"), function=function_name, cases=cases)
