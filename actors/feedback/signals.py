"""From the signals that reach a turn to its reward. Pure."""

from collections.abc import Iterable, Mapping

from penstock.messages.feedback import FeedbackReceived
from penstock.messages.signals.declaration import SignalSpec

FULL_WEIGHT = 1.0
"""Signals of less weight together are filled up with neutral ones to this."""
UNTRUSTED_SHARE_MAX = 0.5
"""Where a trusted key speaks, all others together weigh at most this share of it."""


def reward_of(
    signals: Iterable[FeedbackReceived], declared: Mapping[str, SignalSpec]
) -> float | None:
    """Return the weighted mean score, brought to 0..1; None where no signal counts.

    Example:
        A lone `accept` of value 1 gives 1.0; with weight 0.01, 0.505. Beside a failed
        `tests_passed` of a trusted key it gives 0.33, and no number of accepts gives more.

    """
    totals, scores = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    for signal in signals:
        spec = declared[signal.name]
        weight = spec.weight * signal.weight
        totals[signal.is_trusted] += weight
        scores[signal.is_trusted] += weight * spec.score(signal.value)
    if totals[True] + totals[False] <= 0:
        return None
    share = 1.0
    if totals[True] > 0 and totals[False] > 0:
        share = min(1.0, UNTRUSTED_SHARE_MAX * totals[True] / totals[False])
    total = max(totals[True] + share * totals[False], FULL_WEIGHT)
    return (1.0 + (scores[True] + share * scores[False]) / total) / 2.0
