"""Candidates for tasks, their origin, and an estimate of their difficulty."""

import math
from collections.abc import Callable
from enum import StrEnum

import msgspec

from penstock.messages.errors import PenstockError
from penstock.messages.settings import NonNegativeInt
from penstock.messages.task import HiddenTests, Task


class Rejection(StrEnum):
    """Why a plan or a candidate did not become a task."""

    TOO_LARGE = "repository_too_large"
    NOT_PARSED = "source_not_parsed"
    DOES_NOT_RUN = "does_not_run_in_the_machine"
    TOO_FEW_CALLS = "too_few_informative_calls"
    NO_BUG_SHOWS = "no_bug_shows"
    TESTS_UNCHANGED = "no_test_fails_before_and_passes_after"
    NULL_PASSES = "gate_null_patch_passes"
    GOLD_FAILS = "gate_gold_patch_fails"
    FLAKY = "gate_flaky"
    DUPLICATE = "duplicate"
    MACHINE = "machine_failed"


class TaskRejectedError(PenstockError, ValueError):
    """A plan or a candidate did not become a task."""

    def __init__(self, reason: Rejection, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class TaskOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a task, the basis of splits and statistics."""

    source: str
    """Kind of the source: library, package, commits, or a name chosen by custom code."""
    repository: str
    """Repository, e.g. `networkx`; if splits are by repository, it is only in one of them."""
    kind: str
    """One of bug, feature, commit."""
    function: str = ""
    """Qualified name."""
    path: str = ""
    """File with the bug."""
    digest: str = ""
    """Digest of the function without names, which copies of the function share."""
    change: str = ""
    """Kind of the bug, e.g. `comparison`; the commit of a commit-based task."""
    num_lines: NonNegativeInt = 0
    """Lines of the function, or of the commit's change."""
    num_files: NonNegativeInt = 0
    """Files of the repository as the agent sees it."""
    num_cases_failed: NonNegativeInt = 0
    """Hidden tests that fail before the fix; 0 if they were not counted."""
    num_cases: NonNegativeInt = 0
    hint: str = ""
    """What the instruction names: function, module or symptom."""


class TaskCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A task that has not passed its gates."""

    task: Task
    hidden: HiddenTests
    origin: TaskOrigin
    adapted: list[str] = []
    """Fields of a stranger's task that have no effect, or another one, here."""


class TaskEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a collection, not yet read, so that a malformed one stops no other."""

    name: str
    """Name of its folder, or its id."""
    read: Callable[[], TaskCandidate]
    """Function that reads the task; raises MalformedTaskError."""


EASY_BELOW = 0.35
HARD_FROM = 0.6
_HINTS = {"function": 0.0, "module": 0.5, "symptom": 1.0}
_WEIGHTS = {"places": 0.25, "length": 0.25, "subtlety": 0.25, "hint": 0.25}


def difficulty_terms(origin: TaskOrigin) -> dict[str, float]:
    """Return the terms: files to search, lines to read, how rarely it shows, the hint."""
    cases = max(1, origin.num_cases)
    is_known = origin.kind != "feature" and origin.num_cases_failed > 0
    return {
        "places": min(1.0, math.log2(1 + origin.num_files) / 5),
        "length": min(1.0, origin.num_lines / 40),
        "subtlety": 1.0 - origin.num_cases_failed / cases if is_known else 0.5,
        "hint": _HINTS.get(origin.hint, 0.5),
    }


def difficulty(origin: TaskOrigin) -> float:
    """Return the estimated difficulty, 0 to 1."""
    terms = difficulty_terms(origin)
    return sum(weight * terms[name] for name, weight in _WEIGHTS.items())


def difficulty_label(origin: TaskOrigin) -> str:
    """Return easy, medium or hard."""
    value = difficulty(origin)
    return "easy" if value < EASY_BELOW else "hard" if value >= HARD_FROM else "medium"
