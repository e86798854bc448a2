"""The book of evaluations: verdicts counted by evaluation and by category. Pure.

Verdicts may come before the request (the two are on different streams) and more than once.
"""

from collections import defaultdict

import msgspec

from penstock.messages.reward import EvalCompleted, EvalRequested, Outcome, Verdict


class _Evaluation(msgspec.Struct):
    request: EvalRequested | None = None
    requested_at: float = 0.0
    verdicts: dict[str, Verdict] = {}
    """Verdicts by rollout id."""
    is_closed: bool = False


class EvalBook:
    """All evaluations of a run; `group_id` of an eval rollout is its `eval_id`."""

    def __init__(self) -> None:
        """Start empty."""
        self._evaluations: dict[str, _Evaluation] = defaultdict(_Evaluation)

    def request(self, request: EvalRequested, now: float) -> EvalCompleted | None:
        """Open an evaluation; asking again changes nothing."""
        evaluation = self._evaluations[request.eval_id]
        if evaluation.request is None:
            evaluation.request, evaluation.requested_at = request, now
        return _close_if_full(evaluation)

    def add(self, verdict: Verdict) -> EvalCompleted | None:
        """Count a verdict; return the result if it was the last one."""
        evaluation = self._evaluations[verdict.group_id]
        evaluation.verdicts.setdefault(verdict.rollout_id, verdict)
        return _close_if_full(evaluation)

    def completed(self, eval_id: str) -> None:
        """Take note that the result of an evaluation is on the log already."""
        self._evaluations[eval_id].is_closed = True

    def expire(self, now: float, deadline_s: float) -> list[EvalCompleted]:
        """Close what is older than the deadline: missing verdicts are masked."""
        return [
            _close(evaluation, evaluation.request)
            for evaluation in self._evaluations.values()
            if evaluation.request is not None
            and not evaluation.is_closed
            and now - evaluation.requested_at > deadline_s
        ]


def _close_if_full(evaluation: _Evaluation) -> EvalCompleted | None:
    request = evaluation.request
    if request is None or evaluation.is_closed:
        return None
    return _close(evaluation, request) if len(evaluation.verdicts) >= request.num_tasks else None


def _close(evaluation: _Evaluation, request: EvalRequested) -> EvalCompleted:
    evaluation.is_closed = True
    counted = [v for v in evaluation.verdicts.values() if not v.outcome.is_masked]
    by_category: dict[str, list[bool]] = defaultdict(list)
    for verdict in counted:
        by_category[verdict.category].append(verdict.outcome is Outcome.SOLVED)
    return EvalCompleted(
        eval_id=request.eval_id,
        policy_version=request.policy_version,
        num_solved=sum(map(sum, by_category.values())),
        num_tasks=len(counted),
        num_masked=request.num_tasks - len(counted),
        pass_rate_by_category={
            category: sum(of) / len(of) for category, of in sorted(by_category.items())
        },
    )
