"""The book of evaluations: one at a time, verdicts counted by task, category and source. Pure.

Verdicts may come before the announcement (the two are on different streams) and more than once.

Estimates from several attempts of each task. Pure.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import comb

import msgspec

from penstock.messages.reward import EvalAnnounced, EvalCompleted, Outcome, Verdict


def pass_at_k(num_solved: int, num_attempts: int, k: int) -> float:
    """Return the probability that at least one of k attempts solves a task, without bias.

    Of all ways to choose k of the attempts, the share with a solved one: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.

    Example:
        `pass_at_k(1, 4, 2)` is 1/2.

    """
    assert 0 <= num_solved <= num_attempts and 1 <= k <= num_attempts
    return 1.0 - comb(num_attempts - num_solved, k) / comb(num_attempts, k)


def mean_pass_at_k(counts: Sequence[tuple[int, int]], num_samples: int) -> dict[int, float]:
    """Return pass@k for k = 1, 2, 4 ... and `num_samples`, the mean over tasks.

    Args:
        counts: Solved and all counted attempts of each task.
        num_samples: Attempts that each was to have.

    Returns:
        k to estimate. A task with fewer than k counted attempts is left out of that k, and a k
        that no task reaches is not there.

    """
    ks = {1 << power for power in range(num_samples.bit_length())} | {num_samples}
    found: dict[int, float] = {}
    for k in sorted(ks):
        values = [pass_at_k(solved, num, k) for solved, num in counts if num >= k]
        if values:
            found[k] = sum(values) / len(values)
    return found


class _Evaluation(msgspec.Struct):
    announced: EvalAnnounced | None = None
    began_at: float | None = None
    """When it was the next; None before that."""
    verdicts: dict[str, Verdict] = {}
    """Verdicts by rollout id."""
    is_requested: bool = False
    is_closed: bool = False


class EvalBook:
    """All evaluations of a run; `group_id` of an eval rollout is its `eval_id`."""

    def __init__(self) -> None:
        """Start empty."""
        self._evaluations: dict[str, _Evaluation] = defaultdict(_Evaluation)

    def announce(self, event: EvalAnnounced) -> EvalCompleted | None:
        """Open an evaluation; announcing it again changes nothing."""
        evaluation = self._evaluations[event.eval_id]
        if evaluation.announced is None:
            evaluation.announced = event
        return _close_if_full(evaluation)

    def requested(self, eval_id: str) -> None:
        """Take note that its rollouts are under way."""
        self._evaluations[eval_id].is_requested = True

    def add(self, verdict: Verdict) -> EvalCompleted | None:
        """Count a verdict; return the result if it was the last one."""
        evaluation = self._evaluations[verdict.group_id]
        evaluation.verdicts.setdefault(verdict.rollout_id, verdict)
        return _close_if_full(evaluation)

    def completed(self, eval_id: str) -> None:
        """Take note that the result of an evaluation is on the log already."""
        self._evaluations[eval_id].is_closed = True

    def to_request(self, now: float) -> EvalAnnounced | None:
        """Return the evaluation that is next, unless its rollouts are under way."""
        current = self._current(now)
        return None if current is None or current.is_requested else current.announced

    def expire(self, now: float, deadline_s: float) -> EvalCompleted | None:
        """Close the current one if it takes longer than the deadline: what misses is masked."""
        current = self._current(now)
        if current is None or current.announced is None or current.began_at is None:
            return None
        is_late = now - current.began_at > deadline_s
        return _close(current, current.announced) if is_late else None

    def _current(self, now: float) -> _Evaluation | None:
        """Return the open evaluation of the lowest version: the one that replicas hold."""
        open_ones = [
            (one.announced.policy_version, one)
            for one in self._evaluations.values()
            if one.announced is not None and not one.is_closed
        ]
        if not open_ones:
            return None
        _, current = min(open_ones, key=lambda pair: pair[0])
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
    counted = [v for v in judged if _is_of(v, announced.policy_version)]
    by_task = _by(counted, [_task_index(v, announced.num_samples) for v in counted])
    return EvalCompleted(
        eval_id=announced.eval_id,
        policy_version=announced.policy_version,
        num_solved=sum(map(sum, by_task.values())),
        num_tasks=len(counted),
        num_masked=announced.num_attempts - len(judged),
        num_wrong_version=len(judged) - len(counted),
        pass_rate_by_category=_rates(_by(counted, [v.category for v in counted])),
        pass_rate_by_source=_rates(_by(counted, [v.source for v in counted])),
        eval_set=announced.eval_set,
        is_main=announced.is_main,
        num_samples=announced.num_samples,
        pass_at_k=mean_pass_at_k(
            [(sum(of), len(of)) for of in by_task.values()], announced.num_samples
        ),
    )


def _by(verdicts: Sequence[Verdict], names: Sequence[str]) -> dict[str, list[bool]]:
    """Return which verdicts are of a solved task, by name."""
    found: dict[str, list[bool]] = defaultdict(list)
    for name, verdict in zip(names, verdicts, strict=True):
        found[name].append(verdict.outcome is Outcome.SOLVED)
    return found


def _rates(solved: dict[str, list[bool]]) -> dict[str, float]:
    return {name: sum(of) / len(of) for name, of in sorted(solved.items())}


def _task_index(verdict: Verdict, num_samples: int) -> str:
    """Return which task of the evaluation was attempted: rollouts are numbered task by task."""
    number = verdict.rollout_id.rpartition("-")[2]
    return str(int(number) // num_samples) if number.isdecimal() else verdict.rollout_id


def _is_of(verdict: Verdict, policy_version: int) -> bool:
    """Return whether every token of the rollout is of one version."""
    newest = verdict.policy_version_max
    return newest < 0 or verdict.policy_version == policy_version == newest
