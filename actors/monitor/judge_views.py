"""What judges beside the tests said and cost, and why one says nothing: a section of the status."""

import msgspec

from penstock.messages.reward import JudgeScore, Verdict

NUM_ROWS_MAX = 128
"""Judges times criteria; a log names no more than a configuration allows."""


class JudgeView(msgspec.Struct, kw_only=True):
    """One judge and criterion over the run; `judge/criterion` is its name."""

    version: str = ""
    """The newest."""
    num_scored: int = 0
    num_failed: int = 0
    """Rollouts that its service gave no score for."""
    score_sum: float = 0.0
    disagreement_sum: float = 0.0
    num_prompt_tokens: int = 0
    num_reply_tokens: int = 0
    is_failing: bool = False
    """Whether its service gave no score when it was asked last."""
    note: str = ""
    """The newest failure, or what else it noted."""

    @property
    def score_mean(self) -> float:
        """Mean over the scored rollouts."""
        return self.score_sum / max(1, self.num_scored)

    @property
    def disagreement_mean(self) -> float:
        """Likewise."""
        return self.disagreement_sum / max(1, self.num_scored)


def add_verdict(views: dict[str, JudgeView], verdict: Verdict) -> None:
    """Count the scores of a verdict."""
    for score in verdict.scores:
        name = f"{score.judge}/{score.criterion}" if score.criterion else score.judge
        if name in views or len(views) < NUM_ROWS_MAX:
            _add(views.setdefault(name, JudgeView()), score)


def _add(view: JudgeView, score: JudgeScore) -> None:
    view.version = score.version
    view.num_prompt_tokens += score.num_prompt_tokens
    view.num_reply_tokens += score.num_reply_tokens
    if score.score is None or score.repeats or not view.is_failing:
        view.is_failing = score.score is None
        view.note = score.detail or view.note
    if score.score is None:
        view.num_failed += 1
    else:
        view.num_scored += 1
        view.score_sum += score.score
        view.disagreement_sum += score.disagreement
