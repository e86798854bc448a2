"""The live part of one candidate: arms, guards over users, and the sequential test. Pure.

What each arm is worth to a user, estimated three ways from arms with recorded propensities.

With A the arm of a user, p the probability of it and Y the reward, for each arm a:
IPS is the mean of 1{A=a} Y / p; SNIPS divides by the mean of 1{A=a} / p instead of 1; the doubly
robust one is the mean of m + 1{A=a} (Y - m) / p, where m is the arm's mean before this user.
Source: Dudik, Langford and Li, "Doubly robust policy evaluation and learning", ICML 2011;
Swaminathan and Joachims, "The self-normalized estimator for counterfactual learning", NIPS 2015.

How many users a test needs to see an effect.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable
from statistics import NormalDist

from penstock.actors.gatekeeper.config import GUARDS, GatekeeperConfig
from penstock.actors.gatekeeper.guards import (
    NUM_STAKES,
    BettingTest,
    Differences,
    Guard,
    Mean,
    ToolMix,
    stakes,
    weighted,
)
from penstock.actors.gatekeeper.users import (
    Observation,
    RepliesObserved,
    RepliesSeen,
    RewardObserved,
    Users,
    WindowEnded,
)
from penstock.messages.feedback import InferenceRecorded, LiveSampleJoined
from penstock.messages.gates import Arm, ArmView, Gate, GateState, Variant, parse_variant
from penstock.messages.training import SampleEntry


class ArmEstimates:
    """One arm's; fed with the users of both."""

    def __init__(self, arm: Arm) -> None:
        self._arm = arm
        self._num = 0
        self._weighted = 0.0
        self._weights = 0.0
        self._robust = 0.0
        self.rewards = Mean()
        """Of the users in the arm."""
        self.num_sessions = 0

    def add(self, arm: Arm, share: float, reward: float, num_sessions: int) -> None:
        """Take one user.

        Args:
            arm: Theirs.
            share: Probability of the candidate's arm.
            reward: Mean of their rated sessions.
            num_sessions: Rated.

        """
        model = self.rewards.value(0.5)
        self._num += 1
        self._robust += model
        if arm is not self._arm:
            return
        propensity = share if arm is Arm.CANDIDATE else 1.0 - share
        self._weighted += reward / propensity
        self._weights += 1.0 / propensity
        self._robust += (reward - model) / propensity
        self.rewards.add(reward)
        self.num_sessions += num_sessions

    @property
    def ips(self) -> float:
        """Unbiased; its scale varies with the number drawn into the arm."""
        return self._weighted / self._num if self._num else 0.0

    @property
    def snips(self) -> float:
        """Between the smallest and the largest reward."""
        return self._weighted / self._weights if self._weights else 0.0

    @property
    def doubly_robust(self) -> float:
        """Unbiased, with the variance of what the model leaves."""
        return self._robust / self._num if self._num else 0.0


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


NUM_SAMPLES_MAX = 200_000
"""Samples whose arm is remembered until the trainer settles them."""
LOG_SHOWN_MAX = 100.0
_USER_GUARDS = [name for name in GUARDS if name not in {"tool_mix", "discard_rate", "kl", "ess"}]


class Experiment:
    """Folds the requests and samples of one candidate's experiment, in the order of the log."""

    def __init__(self, number: int, config: GatekeeperConfig) -> None:
        """Begin without users.

        Args:
            number: The candidate's.
            config: Bounds and levels.

        """
        self.number = number
        self._config = config
        test = config.test
        self._users = Users(test, frozenset(config.edit_tools))
        self._guards = {name: Guard(name, config, test.share) for name in _USER_GUARDS}
        self._tools = ToolMix(config)
        self.estimates = {arm: ArmEstimates(arm) for arm in Arm}
        self._all = Mean()
        self._better = BettingTest(test.share, -test.margin)
        self._worse = BettingTest(test.share, 0.0)
        self._differences = Differences(test.share)
        self._arm_of: OrderedDict[str, Arm] = OrderedDict()
        self._discards = {arm: Mean() for arm in Arm}
        self._times: tuple[float, float] | None = None

    def add_record(self, event: InferenceRecorded) -> None:
        """Take a reply, if it is one of this experiment."""
        variant = self._variant(event.variant, event.propensity)
        if variant is None or not event.user:
            return
        at = event.recorded_at
        self._times = (self._times[0] if self._times else at, at)
        self._observe(
            self._users.add_reply(
                variant,
                event.propensity,
                tenant=event.tenant,
                user=event.user,
                session=event.session_id,
                facts=event.facts,
                at=at,
            )
        )

    def add_sample(self, event: LiveSampleJoined) -> None:
        """Take a session's reward."""
        variant = self._variant(event.variant, event.propensity)
        if variant is None or not event.user:
            return
        self._arm_of[event.sample_id] = variant.arm
        if len(self._arm_of) > NUM_SAMPLES_MAX:
            self._arm_of.popitem(last=False)
        self._observe(
            self._users.add_reward(
                variant,
                event.propensity,
                tenant=event.tenant,
                user=event.user,
                sample=event.sample_id,
                reward=None if len(event.unrated) == len(event.turns) else event.reward,
            )
        )

    def add_settled(self, samples: Iterable[SampleEntry]) -> None:
        """See which samples the trainer took and which it discarded."""
        for sample in samples:
            arm = self._arm_of.pop(sample.rollout_id, None)
            if arm is not None:
                self._discards[arm].add(float(not sample.outcome.is_trained))

    def gates(self) -> list[Gate]:
        """Return the guards and the test."""
        guards = [guard.gate() for guard in self._guards.values()]
        return [*guards, self._tools.gate(), self._discard_gate(), self.test_gate()]

    def test_gate(self) -> Gate:
        """Return what users' rewards say."""
        level = self._config.test.alpha / 2.0
        limit = math.log(1.0 / level)
        own, base = (self.estimates[arm].rewards for arm in (Arm.CANDIDATE, Arm.STABLE))
        state, words = GateState.WAITING, "neither better nor worse is shown yet"
        if self._worse.log_wealth >= limit:
            state, words = GateState.REJECTED, "it is worse"
        elif self._better.log_wealth >= limit:
            margin = self._config.test.margin
            state, words = (
                GateState.PASSED,
                f"not worse by {margin:g}" if margin else "it is better",
            )
        words = f"{words}: reward {own.value():.3g} to stable's {base.value():.3g}"
        if self._users.num_uncounted:
            words += f"; {self._users.num_uncounted} replies are of more users than count"
        return Gate(
            name="users",
            state=state,
            words=words,
            value=own.value(),
            baseline=base.value(),
            bound=-self._config.test.margin,
            num_candidate=own.num,
            num_stable=base.num,
        )

    @property
    def evidence(self) -> tuple[float, float]:
        """E-values for better and for worse; bounded for display."""
        better, worse = self._better.log_wealth, self._worse.log_wealth
        return math.exp(min(better, LOG_SHOWN_MAX)), math.exp(min(worse, LOG_SHOWN_MAX))

    def bounds(self) -> tuple[float, float]:
        """Return the confidence bounds of the difference, which hold at any time."""
        return self._differences.bounds(self._config.test.alpha)

    def arms(self, versions: dict[Arm, int]) -> list[ArmView]:
        """Return both arms in figures."""
        return [
            ArmView(
                arm=arm,
                policy_version=versions[arm],
                num_users=one.rewards.num,
                num_sessions=one.num_sessions,
                reward_mean=one.rewards.value(),
                ips=one.ips,
                snips=one.snips,
                doubly_robust=one.doubly_robust,
            )
            for arm, one in self.estimates.items()
        ]

    def missing(self, effect: float) -> tuple[int, float]:
        """Return the sessions per arm that an effect still needs, and the seconds for them.

        At the variance, the sessions per user and the traffic so far; -1 seconds where there is
        none yet.
        """
        test, arms = self._config.test, self.estimates.values()
        num_users = sum(one.rewards.num for one in arms)
        num_sessions = sum(one.num_sessions for one in arms)
        variance = self._all.variance if num_users > 1 else 0.25
        needed = users_needed(effect + test.margin, variance, test.share, test.alpha / 2.0)
        per_user = num_sessions / num_users if num_users else 1.0
        smaller = min(test.share, 1.0 - test.share)
        missing = max(0.0, needed - num_users) * smaller * per_user
        elapsed_s = self._times[1] - self._times[0] if self._times else 0.0
        if elapsed_s <= 0 or not num_sessions:
            return math.ceil(missing), -1.0
        return math.ceil(missing), missing / smaller * elapsed_s / num_sessions

    def _variant(self, text: str, propensity: float) -> Variant | None:
        """Return a variant of this experiment, drawn with its probability; None of any other."""
        variant = parse_variant(text)
        if variant is None or variant.number != self.number:
            return None
        share = self._config.test.share
        expected = share if variant.arm is Arm.CANDIDATE else 1.0 - share
        return variant if math.isclose(propensity, expected) else None

    def _observe(self, observations: Iterable[Observation]) -> None:
        for one in observations:
            match one:
                case RepliesSeen(arm, before, after):
                    for name, value in after.items():
                        self._guards[name].see(arm, before.get(name), value)
                case RepliesObserved(arm, share, replies):
                    for name, value in replies.measures().items():
                        self._guards[name].observe(arm, share, value)
                    self._tools.observe(arm, replies)
                case WindowEnded(arm, share, unrated):
                    self._guards["unrated"].see(arm, None, unrated)
                    self._guards["unrated"].observe(arm, share, unrated)
                case RewardObserved():
                    self._rewarded(one)

    def _rewarded(self, one: RewardObserved) -> None:
        z = weighted(one.arm, one.share, one.reward - self._all.value(0.5))
        self._better.add(z)
        self._worse.add(-z)
        self._differences.add(z)
        self._all.add(one.reward)
        for estimate in self.estimates.values():
            estimate.add(one.arm, one.share, one.reward, one.num_rated)

    def _discard_gate(self) -> Gate:
        settings = self._config.guard("discard_rate")
        own, base = self._discards[Arm.CANDIDATE], self._discards[Arm.STABLE]
        num = min(own.num, base.num)
        words = f"{own.value():.3g} to stable's {base.value():.3g}, bound {settings.bound:g}"
        state = GateState.PASSED
        if num < settings.num_min:
            state, words = GateState.WAITING, f"{words}; {num} of {settings.num_min} samples"
        elif own.value() - base.value() > settings.bound:
            state = GateState.FAILED
        return Gate(
            name="discard_rate",
            state=state,
            words=words,
            value=own.value(),
            baseline=base.value(),
            bound=settings.bound,
            num_candidate=own.num,
            num_stable=base.num,
        )
