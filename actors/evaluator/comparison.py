"""Intervals of pass@k, and two versions compared on the same tasks. Pure.

Tasks are the unit: attempts at one task are alike, so they are averaged first.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import msgspec

from penstock.actors.evaluator.evaluation import pass_at_k

_Z = NormalDist().inv_cdf(0.975)

Counts = tuple[int, int]
"""Solved and counted attempts at a task."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over tasks with its 95% interval."""

    value: float
    low: float
    high: float
    num_tasks: int


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The later of two versions against the earlier one, on the tasks that both attempted."""

    difference: Estimate
    """Difference of the pass rates."""
    num_better: int
    """Tasks of which the later version solved a larger share of its attempts."""
    num_worse: int
    p_value: float
    """Probability of a split at least as uneven if neither were better: the exact two-sided sign
    test, which for one attempt per task is McNemar's."""


def estimate_pass_at_k(counts: Sequence[Counts], k: int) -> Estimate | None:
    """Return pass@k over the tasks with at least k counted attempts; None if there are none.

    The interval is Wilson's, with as many attempts as give the mean's own variance; so it neither
    leaves [0, 1] nor closes where all tasks are alike.
    """
    values = [pass_at_k(solved, num, k) for solved, num in counts if num >= k]
    if not values:
        return None
    num, mean = len(values), sum(values) / len(values)
    spread = sum((value - mean) ** 2 for value in values) / max(1, num - 1)
    weight = mean * (1 - mean) * num / spread if spread else float(num)
    middle = (mean + _Z**2 / (2 * weight)) / (1 + _Z**2 / weight)
    within = mean * (1 - mean) / weight + (_Z / (2 * weight)) ** 2
    half = _Z * math.sqrt(within) / (1 + _Z**2 / weight)
    # Rounding may leave the ends of [0, 1] by a bit.
    low, high = max(0.0, min(mean, middle - half)), min(1.0, max(mean, middle + half))
    return Estimate(value=mean, low=low, high=high, num_tasks=num)


def compare(before: Mapping[str, Counts], after: Mapping[str, Counts]) -> Comparison | None:
    """Compare two versions by task id; None if they have no task in common.

    The interval is Agresti and Min's for matched pairs (Statistics in Medicine 24, 2005): two tasks
    are added, on which the versions differ by +1, -1 and 0, 0 with half a weight each.
    """
    tasks = sorted(before.keys() & after.keys())
    if not tasks:
        return None
    gains = [_rate(after[task]) - _rate(before[task]) for task in tasks]
    num, total = len(gains), sum(gains)
    shrunk = total / (num + 2)
    variance = (sum(gain**2 for gain in gains) + 1) / (num + 2) - shrunk**2
    half = _Z * math.sqrt(variance / (num + 2))
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    return Comparison(
        difference=Estimate(
            value=total / num,
            low=max(-1.0, shrunk - half),
            high=min(1.0, shrunk + half),
            num_tasks=num,
        ),
        num_better=better,
        num_worse=worse,
        p_value=sign_test(better, worse),
    )


def sign_test(num_better: int, num_worse: int) -> float:
    """Return the exact two-sided p-value of the sign test."""
    num, fewer = num_better + num_worse, min(num_better, num_worse)
    tail = sum(math.comb(num, i) for i in range(fewer + 1))
    return min(1.0, 2 * tail / 2**num)


def _rate(counts: Counts) -> float:
    solved, num = counts
    return solved / num
