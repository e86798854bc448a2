"""Whether a run should stop because machines or judges fail too often. Pure.

An end is a rollout's: what a crash interrupts goes on elsewhere and has not ended.
"""

from collections import OrderedDict

from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import EpisodeEnd, RolloutFinished


class NewestEnds:
    """How the newest rollouts ended.

    Events of one rollout may come in any order; it counts once.

    Args:
        share_max: Largest share of failures that may be seen; 1: any.
        window: Newest rollouts that count.
        num_min: As long as there are fewer, nothing is said.

    """

    def __init__(self, share_max: float, window: int, num_min: int) -> None:
        self._share_max, self._window, self._num_min = share_max, window, num_min
        self._failures: OrderedDict[str, str] = OrderedDict()
        """Rollout -> what failed; empty: nothing."""

    def add_rollout(self, event: RolloutFinished) -> None:
        """Count an end, unless somebody wanted it."""
        if event.end is not EpisodeEnd.CANCELLED:
            is_failure = event.end is EpisodeEnd.INFRASTRUCTURE_ERROR
            self._add(event.rollout_id, "machines" if is_failure else "")

    def add_verdict(self, event: Verdict) -> None:
        """Count a rollout that could not be judged as a failure.

        The others count, too: after a restart all verdicts may be read before any rollout's end.
        """
        if event.outcome is not Outcome.CANCELLED:
            is_failure = event.outcome in {Outcome.JUDGE_ERROR, Outcome.INFRASTRUCTURE_ERROR}
            self._add(event.rollout_id, "judges" if is_failure else "")

    @property
    def fault(self) -> str:
        """Why the run should stop; empty where it may go on."""
        failures = list(self._failures.values())
        num_machines, num_judges = failures.count("machines"), failures.count("judges")
        num = num_machines + num_judges
        if len(failures) < self._num_min or num <= self._share_max * len(failures):
            return ""
        return (
            f"infrastructure: of the newest {len(failures)} rollouts, {num_machines} ended because "
            f"machines failed, {num_judges} could not be judged; "
            f"trainer.infrastructure_share_max is {self._share_max:g}"
        )

    def _add(self, rollout_id: str, failure: str) -> None:
        if rollout_id in self._failures:
            self._failures[rollout_id] = self._failures[rollout_id] or failure
            return
        self._failures[rollout_id] = failure
        while len(self._failures) > self._window:
            self._failures.popitem(last=False)
