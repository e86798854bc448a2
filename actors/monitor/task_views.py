"""View of training tasks by source and of evaluations by set: a section of the page."""

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.actors.monitor.curves import append_thinned
from penstock.messages.base import Event
from penstock.messages.reward import (
    EvalCompleted,
    EvalRequested,
    Outcome,
    Verdict,
    VersionComparison,
)
from penstock.messages.task import GroupGranted, Purpose

NUM_NAMES_MAX = 64
"""Largest number of sources, and of sets, as many as a configuration may have."""
NUM_POINTS_MAX = 60
"""Largest number of evaluations kept per set."""


class EvalPoint(msgspec.Struct, kw_only=True):
    """One evaluation on held-out tasks."""

    policy_version: int
    at: float = 0.0
    """End of the evaluation, Unix seconds."""
    wall_s: float = 0.0
    """Seconds from the request of the rollouts to the end of the evaluation."""
    num_solved: int
    num_tasks: int
    """Number of attempts that count."""
    num_masked: int
    num_wrong_version: int = 0
    """Number of verdicts on tokens of another version, which do not count."""
    by_category: dict[str, float] = {}
    by_source: dict[str, float] = {}
    num_samples: int = 1
    pass_at_k: dict[int, float] = {}
    intervals: dict[int, tuple[float, float]] = {}
    comparison: VersionComparison | None = None
    """With the first version evaluated on the set; these are as in `EvalCompleted`."""

    @property
    def pass_rate(self) -> float:
        """Share of the counted attempts that solved their task."""
        return self.num_solved / max(1, self.num_tasks)


class SourceView(msgspec.Struct, kw_only=True):
    """Training on the tasks of one source."""

    num_groups: int = 0
    num_judged: int = 0
    """Number of rollouts with a verdict that is not masked."""
    num_solved: int = 0

    @property
    def pass_rate(self) -> float:
        """Share of the judged rollouts that solved their task."""
        return self.num_solved / max(1, self.num_judged)


class TasksView(msgspec.Struct, kw_only=True):
    """All training tasks and all evaluation sets."""

    num_groups: int = 0
    num_fresh: int = 0
    """Number of tasks that no group has attempted yet."""
    num_revisits: int = 0
    """Number of groups whose task an earlier group had attempted."""
    num_skipped: int = 0
    """Number of tasks that the newest revisit skipped because they are always or never solved."""
    sources: dict[str, SourceView] = {}
    sets: dict[str, list[EvalPoint]] = {}
    """Evaluations by the name of their set; the default set has an empty name."""
    num_evals: int = 0
    num_eval_attempts: int = 0
    """Number of attempts in all evaluations, including those that do not count."""
    eval_s: float = 0.0
    """Total duration of the evaluations in seconds, each from its request to its end."""

    @property
    def words(self) -> str:
        """Summary of fresh, repeated and skipped tasks, in words."""
        if not self.num_groups:
            return "–"
        left = f"{self.num_fresh:,} fresh" if self.num_fresh else "all were attempted"
        again = f"{self.num_revisits / self.num_groups:.0%} of groups again"
        return f"{left}, {again}, {self.num_skipped} skipped"


class TaskViews:
    """Fold of granted groups, training verdicts and evaluation results."""

    def __init__(self, view: TasksView) -> None:
        self._view = view
        self._requested: dict[str, float] = {}
        """Open evaluation -> time of its request, Unix seconds."""
        self.handlers: dict[type[Event], Callable[[Any, float], None]] = {
            GroupGranted: self._group_granted,
            EvalRequested: self._eval_requested,
        }

    def judged(self, event: Verdict) -> None:
        """Count a verdict for the source of its task; ignore masked and evaluation verdicts."""
        if event.purpose is not Purpose.TRAIN or event.outcome.is_masked:
            return
        if source := self._source(event.source):
            source.num_judged += 1
            source.num_solved += event.outcome is Outcome.SOLVED

    def evaluated(self, event: EvalCompleted, at: float) -> EvalPoint:
        """Add an evaluation's result to its set and return its point."""
        point = EvalPoint(
            policy_version=event.policy_version,
            at=at,
            wall_s=max(0.0, at - self._requested.pop(event.eval_id, at)),
            num_solved=event.num_solved,
            num_tasks=event.num_tasks,
            num_masked=event.num_masked,
            num_wrong_version=event.num_wrong_version,
            by_category=event.pass_rate_by_category,
            by_source=event.pass_rate_by_source,
            num_samples=event.num_samples,
            pass_at_k=event.pass_at_k,
            intervals=event.intervals,
            comparison=event.comparison,
        )
        view = self._view
        view.num_evals += 1
        view.num_eval_attempts += point.num_tasks + point.num_masked + point.num_wrong_version
        view.eval_s += point.wall_s
        if event.eval_set in view.sets or len(view.sets) < NUM_NAMES_MAX:
            append_thinned(view.sets.setdefault(event.eval_set, []), point, NUM_POINTS_MAX)
        return point

    def _eval_requested(self, event: EvalRequested, at: float) -> None:
        self._requested[event.eval_id] = at
        # Bounded: an evaluation never ends if its evaluator is gone.
        if len(self._requested) > NUM_NAMES_MAX:
            del self._requested[next(iter(self._requested))]

    def _group_granted(self, event: GroupGranted, at: float) -> None:
        view = self._view
        view.num_groups += 1
        view.num_fresh = event.num_fresh
        if event.attempt:
            view.num_revisits += 1
            view.num_skipped = event.num_skipped
        if source := self._source(event.source):
            source.num_groups += 1

    def _source(self, name: str) -> SourceView | None:
        sources = self._view.sources
        # Bounded, so that the names in a damaged log cannot let the state grow.
        if name not in sources and len(sources) >= NUM_NAMES_MAX:
            return None
        return sources.setdefault(name, SourceView())
