"""Agreement of a judge with people: share, kappa, calibration, intervals. Pure."""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

_Z = 1.959963984540054
"""Normal quantile of a two-sided 95% interval."""
NUM_RESAMPLES = 1000
NUM_BINS = 10


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate and its 95% interval."""

    value: float
    lower: float
    upper: float


class Judgment(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work, judged by a person and by a judge."""

    human: str
    """Choice of the person."""
    judge: str
    """Choice of the judge, nearest to its score."""
    score: float
    """Mean score of the judge over its repeats."""


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Agreement on one criterion."""

    num: int
    agreement: Interval
    """Share of equal choices, with Wilson's interval."""
    kappa: Interval
    """Cohen's kappa, agreement above chance, with a bootstrap interval."""
    confusion: dict[str, dict[str, int]]
    """Counts by the person's choice and the judge's choice."""
    brier: Interval | None = None
    """Brier score with a bootstrap interval, if the choices score 0 and 1."""
    ece: Interval | None = None
    """Expected calibration error over ten bins with a bootstrap interval, likewise."""


def measure(judgments: Sequence[Judgment], choices: Mapping[str, float]) -> Agreement:
    """Return the agreement on one criterion.

    Args:
        judgments: Judgments, at least one.
        choices: Score of each answer.

    """
    num_equal = sum(one.human == one.judge for one in judgments)
    counts = {
        human: dict(Counter(one.judge for one in judgments if one.human == human))
        for human in choices
    }
    is_probability = sorted(choices.values()) == [0.0, 1.0]

    def brier(sample: Sequence[Judgment]) -> float:
        return sum((one.score - choices[one.human]) ** 2 for one in sample) / len(sample)

    def ece(sample: Sequence[Judgment]) -> float:
        return expected_error([(one.score, choices[one.human]) for one in sample])

    return Agreement(
        num=len(judgments),
        agreement=wilson(num_equal, len(judgments)),
        kappa=bootstrapped(judgments, cohens_kappa),
        confusion=counts,
        brier=bootstrapped(judgments, brier) if is_probability else None,
        ece=bootstrapped(judgments, ece) if is_probability else None,
    )


def wilson(num_hits: int, num: int) -> Interval:
    """Return a share with Wilson's score interval (Wilson 1927); [0, 1] for `num` 0."""
    if not num:
        return Interval(value=0.0, lower=0.0, upper=1.0)
    share, square = num_hits / num, _Z * _Z / num
    center = (share + square / 2.0) / (1.0 + square)
    spread = _Z * math.sqrt(share * (1.0 - share) / num + square / (4.0 * num)) / (1.0 + square)
    return Interval(value=share, lower=max(0.0, center - spread), upper=min(1.0, center + spread))


def cohens_kappa(judgments: Sequence[Judgment]) -> float:
    """Return agreement above chance (Cohen 1960); 0 if chance explains all of it."""
    num = len(judgments)
    humans = Counter(one.human for one in judgments)
    judges = Counter(one.judge for one in judgments)
    by_chance = sum(humans[choice] * judges[choice] for choice in humans) / num**2
    observed = sum(one.human == one.judge for one in judgments) / num
    # Both always chose the same answer: nothing is left to explain.
    return (observed - by_chance) / (1.0 - by_chance) if by_chance < 1.0 else 0.0


def expected_error(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the expected calibration error of (probability, outcome 0 or 1) over `NUM_BINS`."""
    bins: list[list[tuple[float, float]]] = [[] for _ in range(NUM_BINS)]
    for probability, outcome in pairs:
        # A probability of exactly 1 belongs to the last bin.
        bins[min(NUM_BINS - 1, int(probability * NUM_BINS))].append((probability, outcome))
    gaps = (abs(sum(p for p, _ in one) - sum(o for _, o in one)) for one in bins)
    return sum(gaps) / len(pairs)


def bootstrapped(
    judgments: Sequence[Judgment], statistic: Callable[[Sequence[Judgment]], float]
) -> Interval:
    """Return a statistic with its percentile bootstrap interval, deterministically."""
    # A fixed seed: the same labels give the same interval.
    drawn = random.Random(0)
    values = sorted(
        statistic(drawn.choices(judgments, k=len(judgments))) for _ in range(NUM_RESAMPLES)
    )
    lower, upper = values[int(0.025 * NUM_RESAMPLES)], values[int(0.975 * NUM_RESAMPLES)]
    return Interval(value=statistic(judgments), lower=lower, upper=upper)
