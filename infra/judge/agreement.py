"""How far a judge agrees with people: share, kappa, calibration, intervals. Pure."""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

_Z = 1.959963984540054
"""Of a two-sided 95% interval."""
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
    """The person's choice."""
    judge: str
    """The judge's, nearest to its score."""
    score: float
    """The judge's mean over its repeats."""


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one criterion."""

    num: int
    agreement: Interval
    """Share of equal choices; Wilson's interval."""
    kappa: Interval
    """Cohen's: agreement above chance; bootstrap interval, as of the two below."""
    confusion: dict[str, dict[str, int]]
    """Person's choice -> judge's choice -> number."""
    brier: Interval | None = None
    """Where the choices score 0 and 1: mean square of score less outcome."""
    ece: Interval | None = None
    """There, too: expected calibration error over ten bins."""


def measure(judgments: Sequence[Judgment], choices: Mapping[str, float]) -> Agreement:
    """Return the figures of one criterion.

    Args:
        judgments: At least one.
        choices: Answer -> its score.

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
    """Return a share with Wilson's score interval; of nothing, anything from 0 to 1.

    Source: Wilson 1927.
    """
    if not num:
        return Interval(value=0.0, lower=0.0, upper=1.0)
    share, square = num_hits / num, _Z * _Z / num
    center = (share + square / 2.0) / (1.0 + square)
    spread = _Z * math.sqrt(share * (1.0 - share) / num + square / (4.0 * num)) / (1.0 + square)
    return Interval(value=share, lower=max(0.0, center - spread), upper=min(1.0, center + spread))


def cohens_kappa(judgments: Sequence[Judgment]) -> float:
    """Return agreement above what both would have by chance; 0 where chance explains all.

    Source: Cohen 1960.
    """
    num = len(judgments)
    humans = Counter(one.human for one in judgments)
    judges = Counter(one.judge for one in judgments)
    by_chance = sum(humans[choice] * judges[choice] for choice in humans) / num**2
    observed = sum(one.human == one.judge for one in judgments) / num
    return (observed - by_chance) / (1.0 - by_chance) if by_chance < 1.0 else 0.0


def expected_error(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the expected calibration error over `NUM_BINS` bins of equal width.

    Args:
        pairs: Probability and outcome (0 or 1).

    """
    bins: list[list[tuple[float, float]]] = [[] for _ in range(NUM_BINS)]
    for probability, outcome in pairs:
        bins[min(NUM_BINS - 1, int(probability * NUM_BINS))].append((probability, outcome))
    gaps = (abs(sum(p for p, _ in one) - sum(o for _, o in one)) for one in bins)
    return sum(gaps) / len(pairs)


def bootstrapped(
    judgments: Sequence[Judgment], figure: Callable[[Sequence[Judgment]], float]
) -> Interval:
    """Return a figure with its percentile bootstrap interval; the same for the same judgments."""
    drawn = random.Random(0)
    values = sorted(
        figure(drawn.choices(judgments, k=len(judgments))) for _ in range(NUM_RESAMPLES)
    )
    lower, upper = values[int(0.025 * NUM_RESAMPLES)], values[int(0.975 * NUM_RESAMPLES)]
    return Interval(value=figure(judgments), lower=lower, upper=upper)
