"""How many users a test needs to see an effect."""

import math
from statistics import NormalDist

from penstock.actors.gatekeeper.evidence import NUM_STAKES, stakes

POWER = 0.8


def users_needed(effect: float, variance: float, share: float, alpha: float) -> float:
    """Return how many users, both arms together, until `BettingTest` sees an effect.

    With probability `POWER`, from the normal approximation of the log wealth of the best stake.

    Args:
        effect: Difference from the null hypothesis, > 0.
        variance: Of a user's observation within an arm.
        share: Probability of the candidate's arm.
        alpha: Level of the one-sided test.

    """
    spread = variance / (share * (1.0 - share))
    limit, quantile = math.log(NUM_STAKES / alpha), NormalDist().inv_cdf(POWER)
    needed = math.inf
    for stake in stakes(share):
        growth = stake * effect - stake * stake * (spread + effect * effect) / 2.0
        if growth > 0:
            swing = quantile * stake * math.sqrt(spread)
            root = (swing + math.sqrt(swing * swing + 4.0 * growth * limit)) / (2.0 * growth)
            needed = min(needed, root * root)
    return needed


def fixed_sessions(rate: float, effect: float, alpha: float = 0.05) -> float:
    """Return the sessions per arm of a test of two proportions that looks once (two-sided).

    Example:
        2.28% of a keep rate of 70%, at the usual 5% and 80%: `fixed_sessions(0.7, 0.016)` is
        about 13,000. Looking at any time costs a bit over twice as many.

    """
    normal = NormalDist()
    quantiles = normal.inv_cdf(1.0 - alpha / 2.0) + normal.inv_cdf(POWER)
    other = min(1.0, rate + effect)
    variance = rate * (1.0 - rate) + other * (1.0 - other)
    return quantiles * quantiles * variance / (effect * effect)
