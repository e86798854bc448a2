"""Guards, which compare the candidate's replies with stable's, and the sequential test. Pure.

A guard blocks promotion while it has too few users, or while the difference between the arms' means
over all replies exceeds its bound. It demands a rollback once a sequential test over users proves
that the difference exceeds the bound. Guards catch a policy that games the reward: they do not
depend on it.

`BettingTest` is a sequential test by betting, whose error bound holds at any stopping time. Each
user is drawn into an arm with a known probability, independent of everything about the user. Under
the null hypothesis that both arms are alike, the inverse-propensity difference
`Z = (A / p - (1 - A) / (1 - p)) (Y - m)` therefore has mean 0 given the past, however users differ
or drift; m may be any number known before the user arrives (here the mean so far, which keeps Z
small). The wealth of a bettor who stakes a fixed share on `Z > margin` is then a nonnegative
supermartingale, and reaches 1 / alpha with probability at most alpha (Ville's inequality). The
stakes form a geometric grid, so that the test has power for both small and large effects.

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
"""Number of stakes in the grid; each is half of the one before it."""
_LARGEST_STAKE = 0.9
"""Largest stake, as a share of the stake that loses everything on the worst outcome."""
_NUM_BISECTIONS = 14
"""Bisections of [-1, 1]: the bounds are exact to 2 / 2**14, about 0.0001."""
_GROWTH = 1.01
"""Growth of the number of users after which the bounds are computed again."""


def stakes(share: float) -> list[float]:
    """Return the grid of stakes for arms drawn with probability `share`.

    The largest keeps the wealth positive whatever happens.
    """
    # |Z| is at most 1 / min(share, 1 - share), and a margin adds at most 1.
    largest = _LARGEST_STAKE / (1.0 / min(share, 1.0 - share) + 1.0)
    return [largest * 0.5**k for k in range(NUM_STAKES)]


class BettingTest:
    """Sequential test of `E Z > margin`, updated with one user at a time."""

    def __init__(self, share: float, margin: float) -> None:
        """Start with a wealth of 1.

        Args:
            share: Probability of the candidate's arm.
            margin: Largest difference under the null hypothesis, -1..1.

        """
        self._margin = margin
        self._stakes = np.asarray(stakes(share))
        self._logs = np.zeros(NUM_STAKES)
        self._by_tenant: dict[str, np.ndarray] = {}

    def add(self, z: float, tenant: str = "") -> None:
        """Bet on one user."""
        gained = np.log1p(self._stakes * (z - self._margin))
        self._logs += gained
        self._by_tenant[tenant] = self._by_tenant.get(tenant, 0.0) + gained

    @property
    def log_wealth(self) -> float:
        """Logarithm of the e-value: log(1 / alpha) rejects at level alpha."""
        return float(_log_mean(self._logs[None, :])[0])

    @property
    def log_wealth_without_one(self) -> float:
        """The least that is left without any one tenant; with a single tenant, all.

        Tenants choose their users: however many say so, a decision must not rest on one tenant. For
        each tenant this is the wealth of a bettor who never bet on it, so the test stays valid.
        """
        if len(self._by_tenant) < 2:
            return self.log_wealth
        others = self._logs - np.stack(list(self._by_tenant.values()))
        return min(self.log_wealth, float(_log_mean(others).min()))


def _log_mean(logs: np.ndarray) -> np.ndarray:
    """Return the log of the mean wealth over stakes, [N, K] -> [N]."""
    # Log-sum-exp around the largest term: the wealth itself overflows with many users.
    top = logs.max(axis=1, keepdims=True)
    return top[:, 0] + np.log(np.exp(logs - top).mean(axis=1))


class DifferenceBounds:
    """Confidence bounds of the difference between the arms, from the Z of each user."""

    def __init__(self, share: float) -> None:
        self._stakes = np.asarray(stakes(share))[:, None]
        self._z = array("d")
        self._known: tuple[int, tuple[float, float]] | None = None
        """Number of users of the last computed bounds, and the bounds."""

    def add(self, z: float) -> None:
        """Add one user's Z."""
        self._z.append(z)

    def bounds(self, alpha: float) -> tuple[float, float]:
        """Return the range of differences not rejected at any time, at alpha / 2 on each side.

        The result may lag behind by 1% of the users.
        """
        # With hundreds of thousands of users this takes seconds, and one more user does not change
        # the result visibly. The bounds are only displayed; no decision depends on them.
        if self._known is not None and len(self._z) < _GROWTH * self._known[0]:
            return self._known[1]
        z = np.frombuffer(self._z, dtype=np.float64)
        limit = math.log(2.0 / alpha)
        found = -self._reach(-z, limit), self._reach(z, limit)
        self._known = (len(self._z), found)
        return found

    def _reach(self, z: np.ndarray, limit: float) -> float:
        """Return the smallest upper bound of the difference that `z` supports."""
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
"""Largest number of tool names per arm: models may invent any number of them."""
_UP, _DOWN = (1.0,), (-1.0,)
_DIRECTIONS = {"reply_length": (1.0, -1.0), "edit_rate": _DOWN}
"""Directions in which a change of a measure is bad; by default only an increase."""


class RunningMean(msgspec.Struct):
    """Running mean and variance."""

    num: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Add one value."""
        self.num += 1
        self.total += value
        self.squares += value * value

    def replace(self, before: float | None, after: float) -> None:
        """Replace an earlier value, or add a new one if there is none."""
        if before is None:
            self.add(after)
        else:
            self.total += after - before
            self.squares += after * after - before * before

    def value(self, otherwise: float = 0.0) -> float:
        """Return the mean, or `otherwise` without values."""
        return self.total / self.num if self.num else otherwise

    @property
    def variance(self) -> float:
        """Sample variance; 0 with fewer than two values."""
        if self.num < 2:
            return 0.0
        # Cancellation can leave a tiny negative number.
        return max(0.0, self.squares - self.total * self.total / self.num) / (self.num - 1)


def weighted(arm: Arm, share: float, value: float) -> float:
    """Return the inverse-propensity difference Z of one user (see the module's docstring)."""
    return value / share if arm is Arm.CANDIDATE else -value / (1.0 - share)


class Guard:
    """Guard of one measure, compared between the arms over users."""

    def __init__(self, name: str, config: GatekeeperConfig, share: float) -> None:
        self._name = name
        self._settings = config.guard(name)
        self._scale = LENGTH_SCALE if name == "reply_length" else 1.0
        self._limit = math.log(1.0 / config.guard_alpha)
        self._arms = {arm: RunningMean() for arm in Arm}
        self._all = RunningMean()
        """Mean over the users in the test."""
        margin = self._settings.bound / self._scale
        self._tests = {sign: BettingTest(share, margin) for sign in _DIRECTIONS.get(name, _UP)}

    def see(self, arm: Arm, before: float | None, after: float) -> None:
        """Update a user's measure, replacing the one from before the newest reply."""
        self._arms[arm].replace(before, after)

    def observe(self, arm: Arm, share: float, value: float, tenant: str = "") -> None:
        """Add a user's final measure to the test; call it once per user."""
        z = weighted(arm, share, value - self._all.value(0.5))
        for sign, test in self._tests.items():
            test.add(sign * z, tenant)
        self._all.add(value)

    def gate(self) -> Gate:
        """Return the state of the guard."""
        candidate, stable = self._arms[Arm.CANDIDATE], self._arms[Arm.STABLE]
        value, baseline = candidate.value() * self._scale, stable.value() * self._scale
        beyond = max(sign * (value - baseline) for sign in self._tests) > self._settings.bound
        is_shown = any(test.log_wealth_without_one >= self._limit for test in self._tests.values())
        num, needed = min(candidate.num, stable.num), self._settings.num_min
        words = f"{value:.3g}, stable {baseline:.3g}, bound {self._settings.bound:g}"
        # Before the number of users: the test is valid at any time, so a proven breach needs no
        # minimum.
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
            num_candidate=candidate.num,
            num_stable=stable.num,
        )


class ToolMix:
    """Guard of the tools called: total variation between the arms' mean shares over users."""

    def __init__(self, config: GatekeeperConfig) -> None:
        self._settings = config.guard("tool_mix")
        self._shares: dict[Arm, dict[str, float]] = {arm: {} for arm in Arm}
        self._num = dict.fromkeys(Arm, 0)

    def observe(self, arm: Arm, replies: Replies) -> None:
        """Add one user's tool calls; every user has the same weight."""
        calls = replies.tools
        total = sum(calls.values())
        if not total:
            return
        self._num[arm] += 1
        shares = self._shares[arm]
        for name, count in calls.items():
            # Clients choose tool names, so their number needs a bound.
            if name in shares or len(shares) < _NUM_TOOLS_COMPARED:
                shares[name] = shares.get(name, 0.0) + count / total

    def gate(self) -> Gate:
        """Return the state of the guard; it passes if no reply calls a tool."""
        candidate, stable = self._num[Arm.CANDIDATE], self._num[Arm.STABLE]
        distance = 0.0
        if candidate and stable:
            first, second = self._shares[Arm.CANDIDATE], self._shares[Arm.STABLE]
            names = {*first, *second}
            distance = 0.5 * sum(
                abs(first.get(n, 0.0) / candidate - second.get(n, 0.0) / stable) for n in names
            )
        needed, bound = self._settings.num_min, self._settings.bound
        words = f"total variation {distance:.3g}, bound {bound:g}"
        state = GateState.PASSED if distance <= bound else GateState.FAILED
        if not candidate and not stable:
            words = "no reply called a tool"
        elif min(candidate, stable) < needed:
            state, words = (
                GateState.WAITING,
                f"{words}; {min(candidate, stable)} of {needed} users per arm",
            )
        return Gate(
            name="tool_mix",
            state=state,
            words=words,
            value=distance,
            bound=bound,
            num_candidate=candidate,
            num_stable=stable,
        )
