"""Tracks evaluations, counts their verdicts by task, category and source, and estimates pass@k.

Pure. Evaluations run one at a time. A verdict may arrive before the announcement of its evaluation
(the two are on different streams) and may arrive more than once.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from penstock.actors.evaluator.estimates import Counts, compare, estimates_by_k
from penstock.messages.reward import (
    EvalAnnounced,
    EvalCompleted,
    Outcome,
    Verdict,
    VersionComparison,
)


def counted_verdicts(verdicts: Iterable[Verdict], policy_version: int) -> list[Verdict]:
    """Return the verdicts that count for an evaluation of a version."""
    return [
        verdict
        for verdict in verdicts
        if not verdict.outcome.is_masked and _is_from_version(verdict, policy_version)
    ]


class _Evaluation(msgspec.Struct):
    announced: EvalAnnounced | None = None
    began_at: float | None = None
    """Time at which it became the current evaluation; None before that."""
    verdicts: dict[str, Verdict] = {}
    """Verdicts by rollout id."""
    is_requested: bool = False
    is_closed: bool = False


class EvalBook:
    """All evaluations of a run. The `group_id` of an evaluation's rollout is its `eval_id`."""

    def __init__(self) -> None:
        """Start without evaluations."""
        self._evaluations: dict[str, _Evaluation] = defaultdict(_Evaluation)

    def announce(self, event: EvalAnnounced) -> EvalCompleted | None:
        """Open an evaluation; ignore a repeated announcement."""
        evaluation = self._evaluations[event.eval_id]
        if evaluation.announced is None:
            evaluation.announced = event
        # All verdicts may have arrived first: announcements travel on another stream.
        return self._close_if_full(evaluation)

    def requested(self, eval_id: str) -> None:
        """Record that the rollouts of an evaluation are requested."""
        self._evaluations[eval_id].is_requested = True

    def add(self, verdict: Verdict) -> EvalCompleted | None:
        """Count a verdict; return the result if it was the last one."""
        evaluation = self._evaluations[verdict.group_id]
        # The first verdict stands: redelivery must not change a result.
        evaluation.verdicts.setdefault(verdict.rollout_id, verdict)
        return self._close_if_full(evaluation)

    def completed(self, eval_id: str) -> None:
        """Record that the result of an evaluation is already on the log."""
        self._evaluations[eval_id].is_closed = True

    def to_request(self, now: float) -> EvalAnnounced | None:
        """Return the current evaluation, or None if its rollouts are already requested."""
        current = self._current(now)
        return None if current is None or current.is_requested else current.announced

    def expire(self, now: float, deadline_s: float) -> EvalCompleted | None:
        """Close the current evaluation if it exceeds the deadline; mask its missing verdicts.

        The clock starts when the evaluation becomes the current one, not when it is announced.
        """
        current = self._current(now)
        if current is None or current.announced is None or current.began_at is None:
            return None
        is_late = now - current.began_at > deadline_s
        return self._close(current, current.announced) if is_late else None

    def _current(self, now: float) -> _Evaluation | None:
        """Return the open evaluation of the lowest version, which is the one that replicas hold."""
        candidates = [
            (evaluation.announced.policy_version, evaluation)
            for evaluation in self._evaluations.values()
            if evaluation.announced is not None and not evaluation.is_closed
        ]
        if not candidates:
            return None
        # `min` keeps the first of equals, so sets of one version run in the order announced.
        _, current = min(candidates, key=lambda pair: pair[0])
        if current.began_at is None:
            current.began_at = now
        return current

    def _close_if_full(self, evaluation: _Evaluation) -> EvalCompleted | None:
        announced = evaluation.announced
        if announced is None or evaluation.is_closed:
            return None
        is_full = len(evaluation.verdicts) >= announced.num_attempts
        return self._close(evaluation, announced) if is_full else None

    def _close(self, evaluation: _Evaluation, announced: EvalAnnounced) -> EvalCompleted:
        evaluation.is_closed = True
        judged = [v for v in evaluation.verdicts.values() if not v.outcome.is_masked]
        counted = counted_verdicts(judged, announced.policy_version)
        by_task = _counts_by_task(evaluation, announced)
        estimates = estimates_by_k(list(by_task.values()), announced.num_samples)
        return EvalCompleted(
            eval_id=announced.eval_id,
            policy_version=announced.policy_version,
            num_solved=sum(solved for solved, _ in by_task.values()),
            num_tasks=len(counted),
            num_masked=announced.num_attempts - len(judged),
            num_wrong_version=len(judged) - len(counted),
            pass_rate_by_category=_rates(_solved_by(counted, [v.category for v in counted])),
            pass_rate_by_source=_rates(_solved_by(counted, [v.source for v in counted])),
            eval_set=announced.eval_set,
            is_main=announced.is_main,
            num_samples=announced.num_samples,
            pass_at_k={k: found.value for k, found in estimates.items()},
            intervals={k: (found.low, found.high) for k, found in estimates.items()},
            comparison=self._compared(announced, by_task),
        )

    def _compared(
        self, announced: EvalAnnounced, by_task: Mapping[str, Counts]
    ) -> VersionComparison | None:
        """Compare with the first version evaluated on the same tasks."""
        same = [
            (other.announced.policy_version, other.announced.eval_id)
            for other in self._evaluations.values()
            if other.announced is not None
            and other.is_closed
            and _are_paired(other.announced, announced)
        ]
        if not same:
            return None
        version, eval_id = min(same)
        first = self._evaluations[eval_id]
        assert first.announced is not None
        return compare(_counts_by_task(first, first.announced), by_task, version)


def _are_paired(before: EvalAnnounced, after: EvalAnnounced) -> bool:
    """Return whether tasks of the same index are the same task, attempted alike."""
    own = msgspec.structs.replace(
        after, eval_id=before.eval_id, policy_version=before.policy_version
    )
    return own == before and before.policy_version < after.policy_version


def _counts_by_task(evaluation: _Evaluation, announced: EvalAnnounced) -> dict[str, Counts]:
    """Return solved and counted attempts by the index of the task."""
    counted = counted_verdicts(evaluation.verdicts.values(), announced.policy_version)
    found = _solved_by(counted, [_task_index(v, announced.num_samples) for v in counted])
    return {index: (sum(solved), len(solved)) for index, solved in found.items()}


def _solved_by(verdicts: Sequence[Verdict], names: Sequence[str]) -> dict[str, list[bool]]:
    """Group verdicts by name and return for each whether the task was solved."""
    found: dict[str, list[bool]] = defaultdict(list)
    for name, verdict in zip(names, verdicts, strict=True):
        found[name].append(verdict.outcome is Outcome.SOLVED)
    return found


def _rates(solved: dict[str, list[bool]]) -> dict[str, float]:
    return {name: sum(attempts) / len(attempts) for name, attempts in sorted(solved.items())}


def _task_index(verdict: Verdict, num_samples: int) -> str:
    """Return the index of the attempted task, or the rollout's id if it has no number."""
    # Rollout ids end in a running number that counts all samples of one task before the next task.
    number = verdict.rollout_id.rpartition("-")[2]
    return str(int(number) // num_samples) if number.isdecimal() else verdict.rollout_id


def _is_from_version(verdict: Verdict, policy_version: int) -> bool:
    """Return whether every token of the rollout was sampled by one given version."""
    newest = verdict.policy_version_max
    # Negative: a verdict from before the field existed, which cannot be checked.
    return newest < 0 or verdict.policy_version == policy_version == newest
