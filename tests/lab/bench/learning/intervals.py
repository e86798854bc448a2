"""Bounds of a difference between two arms, paired by task, over several seeds of training."""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, stdev

_T_TWO_SIDED = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
"""Degrees of freedom -> 97.5% quantile of Student's t."""


def lower_bounds(
    better: Sequence[Mapping[str, bool]], worse: Sequence[Mapping[str, bool]]
) -> dict[str, float]:
    """Return the difference of two arms' pass rates and its lower 95% bounds.

    Args:
        better: By seed, whether each task was solved.
        worse: The other arm's, of the same seeds; tasks that either lacks are left out.

    Returns:
        `difference`: mean over the seeds; `lower_tasks`: lower end of the 95% interval over all
        pairs of tasks, the trained weights taken as given; `lower_seeds`: the same over the means
        of seeds (Student's t), which counts what another training would change; `lower`: the
        smaller one; `num_pairs`: pairs in all.

    """
    by_seed = [
        [float(one[task]) - float(other[task]) for task in sorted(one.keys() & other.keys())]
        for one, other in zip(better, worse, strict=True)
    ]
    means = [fmean(differences) for differences in by_seed]
    mean = fmean(means)
    spread = sum(stdev(of) ** 2 / len(of) for of in by_seed) / len(by_seed) ** 2
    of_tasks = mean - NormalDist().inv_cdf(0.975) * math.sqrt(spread)
    of_seeds = mean - _T_TWO_SIDED[len(means) - 1] * stdev(means) / math.sqrt(len(means))
    figures = {
        "difference": mean,
        "lower_tasks": of_tasks,
        "lower_seeds": of_seeds,
        "lower": min(of_tasks, of_seeds),
    }
    return {name: round(value, 4) for name, value in figures.items()} | {
        "num_pairs": sum(map(len, by_seed))
    }
