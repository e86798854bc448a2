"""View of the scores, costs and failures of judges other than the tests, a section of the page."""

import msgspec

from penstock.messages.reward import JudgeScore, Verdict

NUM_ROWS_MAX = 128
"""Largest number of pairs of judge and criterion, as many as a configuration may have."""


class JudgeView(msgspec.Struct, kw_only=True):
    """Scores of one judge and criterion over the run, named `judge/criterion`."""

    version: str = ""
    """Newest version of the judge."""
    num_scored: int = 0
    num_failed: int = 0
    """Number of rollouts for which the judge's service returned no score."""
    score_sum: float = 0.0
    disagreement_sum: float = 0.0
    num_prompt_tokens: int = 0
    num_reply_tokens: int = 0
    is_failing: bool = False
    """Whether the newest request to the judge's service returned no score."""
    note: str = ""
    """Newest failure or other note of the judge."""

    @property
    def score_mean(self) -> float:
        """Mean score over the scored rollouts."""
        return self.score_sum / max(1, self.num_scored)

    @property
    def disagreement_mean(self) -> float:
        """Mean disagreement between repeated scores, over the scored rollouts."""
        return self.disagreement_sum / max(1, self.num_scored)


def add_verdict(views: dict[str, JudgeView], verdict: Verdict) -> None:
    """Add the scores of a verdict to the views."""
    for score in verdict.scores:
        name = f"{score.judge}/{score.criterion}" if score.criterion else score.judge
        if name in views or len(views) < NUM_ROWS_MAX:
            _add(views.setdefault(name, JudgeView()), score)


def _add(view: JudgeView, score: JudgeScore) -> None:
    view.version = score.version
    view.num_prompt_tokens += score.num_prompt_tokens
    view.num_reply_tokens += score.num_reply_tokens
    # A score without a request (no repeats) does not show that a failing service is back.
    if score.score is None or score.repeats or not view.is_failing:
        view.is_failing = score.score is None
        view.note = score.detail or view.note
    if score.score is None:
        view.num_failed += 1
    else:
        view.num_scored += 1
        view.score_sum += score.score
        view.disagreement_sum += score.disagreement
