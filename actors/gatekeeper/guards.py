"""Guards: what the candidate's replies look like beside stable's, user by user. Pure.

A guard blocks promotion while fewer users are known than it asks for, or while the difference of
the arms' means, over all replies so far, is beyond its bound; and it demands a rollback once a
sequential test over users shows that it is. A reward that was hacked looks good; these do not
follow it.

A sequential test whose error holds whenever one stops: betting on users.

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

import msgspec
import numpy as np

from penstock.actors.gatekeeper.config import GatekeeperConfig
from penstock.actors.gatekeeper.users import LENGTH_SCALE, Replies
from penstock.messages.gates import Arm, Gate, GateState

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


_NUM_TOOLS_COMPARED = 256
_UP, _DOWN = (1.0,), (-1.0,)
_DIRECTIONS = {"reply_length": (1.0, -1.0), "edit_rate": _DOWN}
"""In which direction a measure may be bad; up where none is named."""


class Mean(msgspec.Struct):
    """A running mean."""

    num: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Take one value."""
        self.num += 1
        self.total += value
        self.squares += value * value

    def replace(self, before: float | None, after: float) -> None:
        """Take a value in place of an earlier one, or a new one."""
        if before is None:
            self.add(after)
        else:
            self.total += after - before
            self.squares += after * after - before * before

    def value(self, otherwise: float = 0.0) -> float:
        """Return the mean, or `otherwise` of nothing."""
        return self.total / self.num if self.num else otherwise

    @property
    def variance(self) -> float:
        """Of the values; 0 of fewer than two."""
        if self.num < 2:
            return 0.0
        return max(0.0, self.squares - self.total * self.total / self.num) / (self.num - 1)


def weighted(arm: Arm, share: float, value: float) -> float:
    """Return the inverse-propensity difference of one user (see `evidence`)."""
    return value / share if arm is Arm.CANDIDATE else -value / (1.0 - share)


class Guard:
    """One measure, compared over users."""

    def __init__(self, name: str, config: GatekeeperConfig, share: float) -> None:
        self._name = name
        self._settings = config.guard(name)
        self._scale = LENGTH_SCALE if name == "reply_length" else 1.0
        self._limit = math.log(1.0 / config.guard_alpha)
        self._arms = {arm: Mean() for arm in Arm}
        self._all = Mean()
        """Of the users in the test."""
        margin = self._settings.bound / self._scale
        self._tests = {sign: BettingTest(share, margin) for sign in _DIRECTIONS.get(name, _UP)}

    def see(self, arm: Arm, before: float | None, after: float) -> None:
        """Take a user's measure so far, in place of an earlier one."""
        self._arms[arm].replace(before, after)

    def observe(self, arm: Arm, share: float, value: float) -> None:
        """Take a user's measure for the test, once."""
        z = weighted(arm, share, value - self._all.value(0.5))
        for sign, test in self._tests.items():
            test.add(sign * z)
        self._all.add(value)

    def gate(self) -> Gate:
        """Return where it stands."""
        own, base = self._arms[Arm.CANDIDATE], self._arms[Arm.STABLE]
        value, baseline = own.value() * self._scale, base.value() * self._scale
        beyond = max(sign * (value - baseline) for sign in self._tests) > self._settings.bound
        is_shown = any(test.log_wealth >= self._limit for test in self._tests.values())
        num, needed = min(own.num, base.num), self._settings.num_min
        words = f"{value:.3g} to stable's {baseline:.3g}, bound {self._settings.bound:g}"
        if is_shown:
            state = GateState.REJECTED
        elif num < needed:
            state, words = GateState.WAITING, f"{words}; {num} of {needed} users per arm"
        else:
            state = GateState.FAILED if beyond else GateState.PASSED
        return Gate(
            name=self._name,
            state=state,
            words=words,
            value=value,
            baseline=baseline,
            bound=self._settings.bound,
            num_candidate=own.num,
            num_stable=base.num,
        )


class ToolMix:
    """Which tools are called: total variation between the arms' mean shares over users."""

    def __init__(self, config: GatekeeperConfig) -> None:
        self._settings = config.guard("tool_mix")
        self._shares: dict[Arm, dict[str, float]] = {arm: {} for arm in Arm}
        self._num = dict.fromkeys(Arm, 0)

    def observe(self, arm: Arm, replies: Replies) -> None:
        """Take one user's calls; each user counts alike."""
        calls = replies.tools
        total = sum(calls.values())
        if not total:
            return
        self._num[arm] += 1
        shares = self._shares[arm]
        for name, count in calls.items():
            if name in shares or len(shares) < _NUM_TOOLS_COMPARED:
                shares[name] = shares.get(name, 0.0) + count / total

    def gate(self) -> Gate:
        """Return where it stands; where nobody calls tools there is no mix to compare."""
        own, base = self._num[Arm.CANDIDATE], self._num[Arm.STABLE]
        distance = 0.0
        if own and base:
            first, second = self._shares[Arm.CANDIDATE], self._shares[Arm.STABLE]
            names = {*first, *second}
            distance = 0.5 * sum(
                abs(first.get(n, 0.0) / own - second.get(n, 0.0) / base) for n in names
            )
        needed, bound = self._settings.num_min, self._settings.bound
        words = f"total variation {distance:.3g}, bound {bound:g}"
        state = GateState.PASSED if distance <= bound else GateState.FAILED
        if not own and not base:
            words = "nobody's reply called a tool"
        elif min(own, base) < needed:
            state, words = GateState.WAITING, f"{words}; {min(own, base)} of {needed} users per arm"
        return Gate(
            name="tool_mix",
            state=state,
            words=words,
            value=distance,
            bound=bound,
            num_candidate=own,
            num_stable=base,
        )
