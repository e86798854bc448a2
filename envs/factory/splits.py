"""Splits tasks into train and held-out sets that share nothing a policy could remember.

Tasks that share a function (by digest, so that copies count), or a repository if the split is by
repository, form a class, transitively. A whole class goes to one side, by a hash of its smallest
name.
"""

import hashlib
from collections.abc import Iterable, Sequence
from enum import StrEnum

from penstock.envs.tasks.source import TaskCandidate
from penstock.messages.errors import PenstockError
from penstock.messages.task import Split


class SplitBy(StrEnum):
    """What must not be on both sides."""

    FUNCTION = "function"
    REPOSITORY = "repository"
    """Neither repositories nor functions: copies of a function join their repositories."""


class SplitLeakError(PenstockError, ValueError):
    """A function or repository is on both sides of a split; the text names it."""


def split_tasks(
    candidates: Sequence[TaskCandidate], by: SplitBy, heldout_share: float
) -> dict[str, Split]:
    """Return the split of each task by its id.

    Args:
        heldout_share: Share of classes that are held out, 0 to 1.

    """
    classes = _Classes()
    for one in candidates:
        classes.join(*_ties(one, by))
    names: dict[str, str] = {}
    for one in candidates:
        root = classes.root(_ties(one, by)[0])
        names[root] = min(names.get(root, one.task.task_id), one.task.task_id)
    splits = {}
    for one in candidates:
        name = names[classes.root(_ties(one, by)[0])]
        splits[one.task.task_id] = Split.HELDOUT if _draw(name) < heldout_share else Split.TRAIN
    # Checked on the result: a leak would make held-out numbers worthless without any other sign.
    check_no_leak(candidates, splits, by)
    return splits


def check_no_leak(
    candidates: Iterable[TaskCandidate], splits: dict[str, Split], by: SplitBy
) -> None:
    """Check that nothing is on both sides.

    Raises:
        SplitLeakError: A function or a repository is.

    """
    side: dict[str, Split] = {}
    for one in candidates:
        split = splits[one.task.task_id]
        for tie in _ties(one, by):
            if side.setdefault(tie, split) is not split:
                raise SplitLeakError(f"{tie} is in both splits, e.g. by {one.task.task_id}")


def _ties(candidate: TaskCandidate, by: SplitBy) -> list[str]:
    origin = candidate.origin
    function = f"function {origin.digest or candidate.task.task_id}"
    return [function, f"repository {origin.repository}"] if by is SplitBy.REPOSITORY else [function]


def _draw(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32


class _Classes:
    """Disjoint sets of names."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}

    def root(self, name: str) -> str:
        """Return the name that represents a set."""
        while (parent := self._parents.setdefault(name, name)) != name:
            # Path compression keeps later look-ups short.
            self._parents[name] = self._parents[parent] = self._parents.setdefault(parent, parent)
            name = parent
        return name

    def join(self, *names: str) -> None:
        """Merge the sets of some names."""
        first = self.root(names[0])
        for name in names[1:]:
            self._parents[self.root(name)] = first
