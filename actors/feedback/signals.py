"""Users' signals as numbers: each name's value becomes a score from -1 to 1.

There is no published rule for this; the weights are settings, and these are plain defaults: what a
user did weighs more than what a user said, and what a test found weighs most.
"""

from collections.abc import Callable, Iterable

from penstock.messages.feedback import FeedbackReceived


def _sign(value: float) -> float:
    return 1.0 if value > 0 else -1.0


def _fraction(value: float) -> float:
    return 2.0 * min(1.0, max(0.0, value)) - 1.0


_SCORES: dict[str, Callable[[float], float]] = {
    "thumbs": _sign,
    "accept": _fraction,
    "reject": lambda value: -abs(_fraction(value)),
    "partial_accept": _fraction,
    "edit_distance": lambda value: -_fraction(value),
    "keep_rate_1h": _fraction,
    "keep_rate_1d": _fraction,
    "keep_rate_7d": _fraction,
    "undo": lambda value: -1.0,
    "retry": lambda value: -1.0,
    "dissatisfied_followup": lambda value: -1.0,
    "interrupted": lambda value: -1.0,
    "tests_passed": _fraction,
    "commit": lambda value: 1.0,
    "pr_merged": lambda value: 1.0,
}

DEFAULT_WEIGHTS: dict[str, float] = {
    "thumbs": 1.0,
    "accept": 1.0,
    "reject": 1.0,
    "partial_accept": 1.0,
    "edit_distance": 0.5,
    "keep_rate_1h": 1.0,
    "keep_rate_1d": 1.5,
    "keep_rate_7d": 2.0,
    "undo": 1.0,
    "retry": 0.5,
    "dissatisfied_followup": 1.0,
    "interrupted": 0.5,
    "tests_passed": 2.0,
    "commit": 1.0,
    "pr_merged": 2.0,
}


def is_known(name: str) -> bool:
    """Return whether a signal has a meaning here."""
    return name in _SCORES


def reward_of(signals: Iterable[FeedbackReceived], weights: dict[str, float]) -> float | None:
    """Return the weighted mean score, brought to 0..1; None where no signal counts.

    Example:
        A single `accept` with value 1 gives 1.0, a single `reject` 0.0.

    """
    total = score = 0.0
    for signal in signals:
        weight = weights.get(signal.name, 0.0) * signal.weight
        if weight > 0 and is_known(signal.name):
            total += weight
            score += weight * _SCORES[signal.name](signal.value)
    return (1.0 + score / total) / 2.0 if total > 0 else None
