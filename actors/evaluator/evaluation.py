"""Tracks evaluations, counts their verdicts by task, category and source, and estimates pass@k.

Pure. Evaluations run one at a time. A verdict may arrive before the announcement of its evaluation
(the two are on different streams) and may arrive more than once.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import comb

import msgspec

from penstock.messages.reward import EvalAnnounced, EvalCompleted, Outcome, Verdict


def pass_at_k(num_solved: int, num_attempts: int, k: int) -> float:
    """Return the unbiased estimate of the probability that one of k attempts solves a task.

    It is the share of k-subsets of the n attempts that contain a solved one:
    1 - C(n-c, k) / C(n, k), with c solved attempts.

    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.

    Example:
        `pass_at_k(1, 4, 2)` is 1/2.

    """
    assert 0 <= num_solved <= num_attempts and 1 <= k <= num_attempts
    return 1.0 - comb(num_attempts - num_solved, k) / comb(num_attempts, k)


def reported_ks(num_samples: int) -> list[int]:
    """Return k = 1, 2, 4 ... and the number of attempts requested per task, ascending."""
    return sorted({1 << power for power in range(num_samples.bit_length())} | {num_samples})


def counted_verdicts(verdicts: Iterable[Verdict], policy_version: int) -> list[Verdict]:
    """Return the verdicts that count for an evaluation of a version."""
    return [
        verdict
        for verdict in verdicts
        if not verdict.outcome.is_masked and _is_from_version(verdict, policy_version)
    ]


def mean_pass_at_k(counts: Sequence[tuple[int, int]], num_samples: int) -> dict[int, float]:
    """Return pass@k averaged over tasks, for k = 1, 2, 4 ... and `num_samples`.

    Args:
        counts: Number of solved attempts and of all counted attempts, per task.
        num_samples: Number of attempts requested per task.

    Returns:
        Estimates by k. A task with fewer than k counted attempts does not contribute to that k;
        a k that no task reaches is absent.

    """
    found: dict[int, float] = {}
    for k in reported_ks(num_samples):
        values = [pass_at_k(solved, num, k) for solved, num in counts if num >= k]
        if values:
            found[k] = sum(values) / len(values)
    return found


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
        return _close_if_full(evaluation)

    def requested(self, eval_id: str) -> None:
        """Record that the rollouts of an evaluation are requested."""
        self._evaluations[eval_id].is_requested = True

    def add(self, verdict: Verdict) -> EvalCompleted | None:
        """Count a verdict; return the result if it was the last one."""
        evaluation = self._evaluations[verdict.group_id]
        # The first verdict stands: redelivery must not change a result.
        evaluation.verdicts.setdefault(verdict.rollout_id, verdict)
        return _close_if_full(evaluation)

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
        return _close(current, current.announced) if is_late else None

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


def _close_if_full(evaluation: _Evaluation) -> EvalCompleted | None:
    announced = evaluation.announced
    if announced is None or evaluation.is_closed:
        return None
    is_full = len(evaluation.verdicts) >= announced.num_attempts
    return _close(evaluation, announced) if is_full else None


def _close(evaluation: _Evaluation, announced: EvalAnnounced) -> EvalCompleted:
    evaluation.is_closed = True
    judged = [v for v in evaluation.verdicts.values() if not v.outcome.is_masked]
    counted = counted_verdicts(judged, announced.policy_version)
    by_task = _solved_by(counted, [_task_index(v, announced.num_samples) for v in counted])
    return EvalCompleted(
        eval_id=announced.eval_id,
        policy_version=announced.policy_version,
        num_solved=sum(map(sum, by_task.values())),
        num_tasks=len(counted),
        num_masked=announced.num_attempts - len(judged),
        num_wrong_version=len(judged) - len(counted),
        pass_rate_by_category=_rates(_solved_by(counted, [v.category for v in counted])),
        pass_rate_by_source=_rates(_solved_by(counted, [v.source for v in counted])),
        eval_set=announced.eval_set,
        is_main=announced.is_main,
        num_samples=announced.num_samples,
        pass_at_k=mean_pass_at_k(
            [(sum(attempts), len(attempts)) for attempts in by_task.values()], announced.num_samples
        ),
    )


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
