"""Guards: what the candidate's replies look like beside stable's, user by user. Pure.

A guard blocks promotion while fewer users are known than it asks for, or while the difference of
the arms' means, over all replies so far, is beyond its bound; and it demands a rollback once a
sequential test over users shows that it is. A reward that was hacked looks good; these do not
follow it.
"""

import math

import msgspec

from penstock.actors.gatekeeper.config import GatekeeperConfig
from penstock.actors.gatekeeper.evidence import BettingTest
from penstock.actors.gatekeeper.users import LENGTH_SCALE, Replies
from penstock.messages.gates import Arm, Gate, GateState

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
