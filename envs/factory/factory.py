"""Makes tasks: drafts plans and gates candidates concurrently, and counts rejections."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.envs.factory.bug_injection import InjectConfig, InjectedSource
from penstock.envs.factory.lab import MachineLab
from penstock.envs.factory.modules import folder_modules, library_modules, package_modules
from penstock.envs.factory.plans import TaskPlan, TaskSource
from penstock.envs.tasks.gates import check_candidate
from penstock.envs.tasks.source import (
    Rejection,
    TaskCandidate,
    TaskRejectedError,
    difficulty,
    difficulty_label,
)
from penstock.messages.task import Split

DRAFT_S_MAX = 900.0
EXAMPLES_MAX = 5
MACHINES_MAX = 3
"""Machines to try for one draft or one gate."""
T = TypeVar("T")
Progress = Callable[[str], None]


class MakingCounts(msgspec.Struct, kw_only=True):
    """Number of plans that became tasks, and reasons why others did not."""

    num_plans: int = 0
    num_candidates: int = 0
    num_tasks: int = 0
    rejected: dict[str, int] = {}
    """Number of rejected plans or candidates by reason."""
    examples: dict[str, list[str]] = {}
    """Some of their names by reason."""
    wall_s: float = 0.0
    by_source: dict[str, int] = {}


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of making a task set."""

    num_tasks_max: int = 300
    num_concurrent: int = 2
    """Plans drafted at once."""
    wall_s_max: float = 7200.0
    """Seconds after which no further plan is begun."""


class Factory:
    """Makes one task set."""

    def __init__(self, lab: MachineLab, bounds: Bounds, say: Progress) -> None:
        self._lab, self._bounds, self._say = lab, bounds, say
        self._started = 0.0
        self.tasks: list[TaskCandidate] = []
        self.counts = MakingCounts()
        self._seen: set[tuple[str, str]] = set()
        self._rejected: Counter[str] = Counter()

    async def make(self, sources: list[TaskSource]) -> list[TaskCandidate]:
        """Draft and gate until plans, number or time run out; return tasks sorted by id."""
        self._started = time.monotonic()
        plans = _in_turns(sources)
        async with asyncio.TaskGroup() as group:
            for _ in range(self._bounds.num_concurrent):
                group.create_task(self._work(plans))
        self.counts.rejected = dict(self._rejected.most_common())
        self.counts.num_tasks = len(self.tasks)
        self.counts.by_source = dict(Counter(one.origin.source for one in self.tasks))
        self.counts.wall_s = time.monotonic() - self._started
        return sorted(self.tasks, key=lambda one: one.task.task_id)

    async def _work(self, plans: Iterator[TaskPlan]) -> None:
        # All workers draw from one iterator.
        for plan in plans:
            if self._is_full() or time.monotonic() - self._started > self._bounds.wall_s_max:
                return
            self.counts.num_plans += 1
            try:
                # One plan whose code hangs must not stop its worker.
                async with asyncio.timeout(DRAFT_S_MAX):
                    for candidate in await _again(partial(plan.draft, self._lab)):
                        if not self._is_full():
                            await self._gate(candidate)
            except TaskRejectedError as error:
                self._reject(error)
            except TimeoutError:
                self._reject(TaskRejectedError(Rejection.MACHINE, f"{plan.name}: no end in time"))
            if self.counts.num_plans % 25 == 0:
                self._say(self._line())

    def _is_full(self) -> bool:
        return len(self.tasks) >= self._bounds.num_tasks_max

    async def _gate(self, candidate: TaskCandidate) -> None:
        self.counts.num_candidates += 1
        # By digest, because repositories contain copies of each other's functions.
        key = (candidate.origin.digest, candidate.origin.change)
        if key in self._seen:
            self._reject(TaskRejectedError(Rejection.DUPLICATE, candidate.task.task_id))
            return
        self._seen.add(key)
        try:
            await _again(
                partial(check_candidate, candidate, self._lab.grade, solve=self._lab.solve)
            )
        except TaskRejectedError as error:
            self._reject(error)
        else:
            self.tasks.append(candidate)

    def _reject(self, error: TaskRejectedError) -> None:
        self._rejected[error.reason] += 1
        examples = self.counts.examples.setdefault(error.reason, [])
        if len(examples) < EXAMPLES_MAX:
            examples.append(error.detail[:200])

    def _line(self) -> str:
        tried, made = self.counts.num_plans, len(self.tasks)
        common = ", ".join(f"{reason} {num}" for reason, num in self._rejected.most_common(3))
        return f"{tried} plans, {made} tasks; rejected: {common or 'none'}"


def open_source(name: str, config: InjectConfig) -> TaskSource:
    """Return the source that a command-line argument names.

    Args:
        name: `stdlib`, the path of a folder, or the import name of an installed package.

    Raises:
        NotFoundError: The name is none of these.

    """
    if name == "stdlib":
        return InjectedSource("library", library_modules(), config)
    folder = Path(name)
    if "/" in name or folder.is_dir():
        return InjectedSource("folder", folder_modules(folder), config)
    return InjectedSource("package", package_modules(name), config)


async def _again(work: Callable[[], Awaitable[T]]) -> T:
    for _ in range(MACHINES_MAX - 1):
        try:
            return await work()
        except TaskRejectedError as error:
            if error.reason is not Rejection.MACHINE:
                raise
    return await work()


def _in_turns(sources: list[TaskSource]) -> Iterator[TaskPlan]:
    waiting = [source.plans() for source in sources]
    while waiting:
        for plans in list(waiting):
            plan = next(plans, None)
            if plan is None:
                waiting.remove(plans)
            else:
                yield plan


def statistics(
    candidates: Sequence[TaskCandidate], splits: dict[str, Split], counts: MakingCounts
) -> dict[str, Any]:
    """Return counts by split, source, kind, change and difficulty, and of rejections by reason."""
    origins = [one.origin for one in candidates]
    estimates = sorted(difficulty(origin) for origin in origins)
    return {
        "num_tasks": len(candidates),
        "num_repositories": len({origin.repository for origin in origins}),
        "num_functions": len({origin.digest for origin in origins}),
        "by_split": _counted(splits[one.task.task_id].value for one in candidates),
        "by_source": _counted(origin.source for origin in origins),
        "by_kind": _counted(origin.kind for origin in origins),
        "by_change": _counted(origin.change for origin in origins if origin.kind == "bug"),
        "by_difficulty": _counted(difficulty_label(origin) for origin in origins),
        "difficulty_median": round(estimates[len(estimates) // 2], 3) if estimates else None,
        "num_hidden_tests": sum(len(one.hidden.expected) for one in candidates),
        "num_plans": counts.num_plans,
        "num_candidates": counts.num_candidates,
        "tasks_per_plan": round(len(candidates) / counts.num_plans, 3)
        if counts.num_plans
        else None,
        "rejected": counts.rejected,
        "wall_s": round(counts.wall_s, 1),
    }


def _counted(values: Any) -> dict[str, int]:
    return dict(Counter(values).most_common())
