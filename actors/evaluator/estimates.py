"""pass@k with intervals, and two versions compared on the same tasks. Pure.

Tasks are the unit: attempts at one task are alike, so they are averaged first.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

from penstock.messages.reward import Estimate, VersionComparison

_Z = NormalDist().inv_cdf(0.975)

Counts = tuple[int, int]
"""Solved and counted attempts at a task."""


def pass_at_k(num_solved: int, num_attempts: int, k: int) -> float:
    """Estimate, without bias, the probability that one of k attempts solves a task.

    It is 1 - C(n - c, k) / C(n, k): the share of the choices of k out of n attempts that contain
    one of the c solved ones (arXiv 2107.03374).

    Args:
        num_solved: Number of solved attempts.
        num_attempts: Number of attempts, at least k.
        k: Number of attempts in the estimated case.

    """
    return 1.0 - math.comb(num_attempts - num_solved, k) / math.comb(num_attempts, k)


def estimates_by_k(counts: Sequence[Counts], num_samples: int) -> dict[int, Estimate]:
    """Return pass@k over tasks, for k = 1, 2, 4 ... and `num_samples`.

    Args:
        counts: Counts of each task.
        num_samples: Number of attempts requested per task.

    Returns:
        Estimates by k, ascending. Each covers the tasks with at least k attempts; a k that no task
        reaches is absent.

    """
    ks = {1 << power for power in range(num_samples.bit_length())} | {num_samples}
    found = {k: [pass_at_k(*each, k) for each in counts if each[1] >= k] for k in sorted(ks)}
    return {k: _estimate(values) for k, values in found.items() if values}


def _estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of shares in [0, 1] with its interval.

    The interval is Wilson's, with as many attempts as give the mean's own variance; so it neither
    leaves [0, 1] nor closes where all tasks are alike.
    """
    num, mean = len(values), sum(values) / len(values)
    spread = sum((value - mean) ** 2 for value in values) / max(1, num - 1)
    weight = mean * (1 - mean) * num / spread if spread else float(num)
    middle = (mean + _Z**2 / (2 * weight)) / (1 + _Z**2 / weight)
    within = mean * (1 - mean) / weight + (_Z / (2 * weight)) ** 2
    half = _Z * math.sqrt(within) / (1 + _Z**2 / weight)
    # Rounding may leave the ends of [0, 1] by a bit.
    low, high = max(0.0, min(mean, middle - half)), min(1.0, max(mean, middle + half))
    return Estimate(value=mean, low=low, high=high, num_tasks=num)


def compare(
    before: Mapping[str, Counts], after: Mapping[str, Counts], policy_version: int
) -> VersionComparison | None:
    """Compare two versions by task; None if they have no task in common.

    The interval is Agresti and Min's for matched pairs (Statistics in Medicine 24, 2005): two tasks
    are added, on which the versions differ by +1, -1 and 0, 0 with half a weight each.

    Args:
        before: Counts of the earlier version by task.
        after: Counts of the later one.
        policy_version: Number of the earlier one.

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
    mean, low, high = total / num, max(-1.0, shrunk - half), min(1.0, shrunk + half)
    return VersionComparison(
        policy_version=policy_version,
        difference=Estimate(value=mean, low=min(low, mean), high=max(high, mean), num_tasks=num),
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
