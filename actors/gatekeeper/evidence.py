"""A sequential test whose error holds whenever one stops: betting on users.

Each user is drawn into an arm by a coin of known bias that is independent of everything about
them, so under the null hypothesis that both arms are alike the inverse-propensity difference
`Z = (A / p - (1 - A) / (1 - p)) (Y - m)` has mean 0 given the past, whatever users are like,
however they differ and however they drift; m may be any number known before the user came (here
the mean so far, which makes Z small). A bettor who stakes a share of the wealth on `Z > margin`
then has a wealth that is a nonnegative supermartingale, and it reaches 1 / alpha with probability
alpha at most (Ville). Stakes are mixed over a geometric grid, so that small and large effects both
show.

Source: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS B
2024, section 4 (arXiv 2010.09686); with propensities: Karampatziakis, Mineiro and Ramdas,
"Off-policy confidence sequences", ICML 2021 (arXiv 2102.09540).
"""

import math
from array import array

import numpy as np

NUM_STAKES = 7
_LARGEST_STAKE = 0.9
"""Of what would lose everything on the worst outcome."""
_NUM_BISECTIONS = 14
_GROWTH = 1.01
"""By how much the users grow before bounds are computed again: they are shown, nothing follows."""


def stakes(share: float) -> list[float]:
    """Return the grid of stakes for arms drawn with probability `share`.

    |Z| <= 1 / min(share, 1 - share), and a margin adds at most 1.
    """
    largest = _LARGEST_STAKE / (1.0 / min(share, 1.0 - share) + 1.0)
    return [largest * 0.5**k for k in range(NUM_STAKES)]


class BettingTest:
    """Evidence that `E Z > margin`, one user after the other."""

    def __init__(self, share: float, margin: float) -> None:
        """Begin with a wealth of 1.

        Args:
            share: Probability of the candidate's arm.
            margin: -1..1; the null hypothesis is a difference of this or less.

        """
        self._margin = margin
        self._stakes = stakes(share)
        self._logs = [0.0] * NUM_STAKES

    def add(self, z: float) -> None:
        """Bet on one user."""
        gain = z - self._margin
        for k, stake in enumerate(self._stakes):
            self._logs[k] += math.log1p(stake * gain)

    @property
    def log_wealth(self) -> float:
        """Logarithm of the e-value: log(1 / alpha) rejects at level alpha."""
        top = max(self._logs)
        return top + math.log(sum(math.exp(one - top) for one in self._logs) / NUM_STAKES)


class Differences:
    """The Z of each user, for the bounds of the difference."""

    def __init__(self, share: float) -> None:
        self._stakes = np.asarray(stakes(share))[:, None]
        self._z = array("d")
        self._known: tuple[int, tuple[float, float]] | None = None
        """Users that the last bounds were of, and these."""

    def add(self, z: float) -> None:
        """Take one user's."""
        self._z.append(z)

    def bounds(self, alpha: float) -> tuple[float, float]:
        """Return the differences that are not rejected, each side at alpha / 2, at any time.

        Of hundreds of thousands of users it takes seconds, and moves by nothing with one more: they
        are computed again once there are 1% more.
        """
        if self._known is not None and len(self._z) < _GROWTH * self._known[0]:
            return self._known[1]
        z = np.frombuffer(self._z, dtype=np.float64)
        limit = math.log(2.0 / alpha)
        found = -self._reach(-z, limit), self._reach(z, limit)
        self._known = (len(self._z), found)
        return found

    def _reach(self, z: np.ndarray, limit: float) -> float:
        """Return the largest difference that `z` does not rule out from above."""
        low, high = -1.0, 1.0
        for _ in range(_NUM_BISECTIONS):
            middle = (low + high) / 2.0
            logs = np.log1p(self._stakes * (middle - z)).sum(axis=1)
            top = float(logs.max())
            if top + math.log(float(np.exp(logs - top).mean())) >= limit:
                high = middle
            else:
                low = middle
        return high
