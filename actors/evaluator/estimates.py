"""Estimates from several attempts of each task. Pure."""

from collections.abc import Sequence
from math import comb


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
