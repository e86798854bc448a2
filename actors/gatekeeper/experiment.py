"""One candidate's live experiment: reward estimates per arm, guards, and the sequential test. Pure.

`ArmEstimates` estimates the mean reward of an arm in three ways from recorded propensities. With A
the arm of a user, p its probability and Y the reward, for each arm a: IPS is the mean of
1{A=a} Y / p; SNIPS divides that by the mean of 1{A=a} / p; the doubly robust estimate is the mean
of m + 1{A=a} (Y - m) / p, where m is the arm's mean before this user.
Source: Dudik, Langford and Li, "Doubly robust policy evaluation and learning", ICML 2011;
Swaminathan and Joachims, "The self-normalized estimator for counterfactual learning", NIPS 2015.

`users_needed` and `fixed_horizon_sessions` compute the sample sizes that a test needs to detect an
effect.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable
from statistics import NormalDist, median

from penstock.actors.gatekeeper.config import GUARDS, GatekeeperConfig
from penstock.actors.gatekeeper.guards import (
    NUM_STAKES,
    BettingTest,
    DifferenceBounds,
    Guard,
    RunningMean,
    ToolMix,
    stakes,
    weighted,
)
from penstock.actors.gatekeeper.users import (
    Observation,
    ReplyObservation,
    RewardObservation,
    RunningReplyMeasures,
    Users,
    WindowEnd,
)
from penstock.messages.feedback import InferenceRecorded, LiveSampleJoined
from penstock.messages.gates import Arm, ArmView, Gate, GateState, Variant, parse_variant
from penstock.messages.training import SampleEntry


class ArmEstimates:
    """Reward estimates of one arm, computed from the users of both arms."""

    def __init__(self, arm: Arm) -> None:
        self._arm = arm
        self._num = 0
        self._weighted = 0.0
        self._weights = 0.0
        self._robust = 0.0
        self.rewards = RunningMean()
        """Mean reward of the users in the arm."""
        self.num_sessions = 0

    def add(self, arm: Arm, share: float, reward: float, num_sessions: int) -> None:
        """Add one user.

        Args:
            arm: Arm that the user was drawn into.
            share: Probability of the candidate's arm.
            reward: Mean over the user's rated sessions.
            num_sessions: Number of the user's rated sessions.

        """
        # The model must not depend on this user, or the doubly robust estimate would be biased;
        # 0.5 is the middle of the range of rewards.
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
        """IPS estimate: unbiased, but it varies with the number of users drawn into the arm."""
        return self._weighted / self._num if self._num else 0.0

    @property
    def snips(self) -> float:
        """SNIPS estimate: slightly biased, always within the range of rewards."""
        return self._weighted / self._weights if self._weights else 0.0

    @property
    def doubly_robust(self) -> float:
        """Doubly robust estimate: unbiased, with the variance of the model's residuals only."""
        return self._robust / self._num if self._num else 0.0


POWER = 0.8
"""Probability of detecting the effect, the usual choice in sample-size calculations."""


def users_needed(effect: float, variance: float, share: float, alpha: float) -> float:
    """Return the users of both arms after which `BettingTest` detects an effect.

    Detection is with probability `POWER`, by the normal approximation of the log wealth of the best
    stake.

    Args:
        effect: Difference from the null hypothesis, > 0.
        variance: Variance of a user's observation within an arm.
        share: Probability of the candidate's arm.
        alpha: Level of the one-sided test.

    """
    spread = variance / (share * (1.0 - share))
    limit, quantile = math.log(NUM_STAKES / alpha), NormalDist().inv_cdf(POWER)
    needed = math.inf
    for stake in stakes(share):
        growth = stake * effect - stake * stake * (spread + effect * effect) / 2.0
        # With n users the log wealth has mean n * growth and deviation sqrt(n) * spread: solve the
        # quadratic in sqrt(n). A stake that is too large for the effect never gets there.
        if growth > 0:
            swing = quantile * stake * math.sqrt(spread)
            root = (swing + math.sqrt(swing * swing + 4.0 * growth * limit)) / (2.0 * growth)
            needed = min(needed, root * root)
    return needed


def fixed_horizon_sessions(rate: float, effect: float, alpha: float = 0.05) -> float:
    """Return the sessions per arm that a two-sided, fixed-horizon test of two proportions needs.

    Example:
        To detect 2.28% of a keep rate of 70% at level 5% and power 80%,
        `fixed_horizon_sessions(0.7,
        0.016)` is about 13,000. A test that may stop at any time needs slightly over twice as many.

    """
    normal = NormalDist()
    quantiles = normal.inv_cdf(1.0 - alpha / 2.0) + normal.inv_cdf(POWER)
    other = min(1.0, rate + effect)
    variance = rate * (1.0 - rate) + other * (1.0 - other)
    return quantiles * quantiles * variance / (effect * effect)


NUM_SAMPLES_MAX = 200_000
"""Largest number of samples whose arm is kept until the trainer uses or discards them."""
LOG_SHOWN_MAX = 100.0
"""Largest exponent of a reported e-value, so that it stays a finite number."""
_USER_GUARDS = [name for name in GUARDS if name not in {"tool_mix", "discard_rate", "kl", "ess"}]


class Experiment:
    """State of one candidate's experiment, from its requests and samples in log order."""

    def __init__(self, number: int, config: GatekeeperConfig) -> None:
        """Start without users.

        Args:
            number: Number of the candidate.
            config: Gatekeeper settings.

        """
        self.number = number
        self._config = config
        test = config.test
        self._users = Users(test, frozenset(config.edit_tools))
        self._guards = {name: Guard(name, config, test.share) for name in _USER_GUARDS}
        self._tools = ToolMix(config)
        self.estimates = {arm: ArmEstimates(arm) for arm in Arm}
        self._all = RunningMean()
        self._better = BettingTest(test.share, -test.margin)
        self._worse = BettingTest(test.share, 0.0)
        self._differences = DifferenceBounds(test.share)
        self._tenants: dict[str, RunningMean] = {}
        """Difference between the arms as each tenant's users see it."""
        self._arm_of: OrderedDict[str, Arm] = OrderedDict()
        self._discards = {arm: RunningMean() for arm in Arm}
        self._times: tuple[float, float] | None = None

    def add_record(self, event: InferenceRecorded) -> None:
        """Add a reply; ignore it if it is not part of this experiment."""
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
        """Add a session's reward; ignore it if it is not part of this experiment."""
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
                # A session in which no turn is rated has no reward, whatever the event's default.
                reward=None if len(event.unrated) == len(event.turns) else event.reward,
            )
        )

    def add_settled(self, samples: Iterable[SampleEntry]) -> None:
        """Count which of the arms' samples the trainer used and which it discarded."""
        for sample in samples:
            arm = self._arm_of.pop(sample.rollout_id, None)
            if arm is not None:
                self._discards[arm].add(float(not sample.outcome.is_trained))

    def gates(self) -> list[Gate]:
        """Return the gates of all guards, followed by that of the test."""
        guards = [guard.gate() for guard in self._guards.values()]
        return [*guards, self._tools.gate(), self._discard_gate(), self.test_gate()]

    def test_gate(self) -> Gate:
        """Return the state of the sequential test on users' rewards."""
        # Two one-sided tests (better, worse) share the error probability.
        level = self._config.test.alpha / 2.0
        limit = math.log(1.0 / level)
        candidate, stable = (self.estimates[arm].rewards for arm in (Arm.CANDIDATE, Arm.STABLE))
        state, words = GateState.WAITING, "no significant difference yet"
        margin = self._config.test.margin
        # Over tenants, not users: a tenant may make up as many users as it likes.
        middle = median(mean.value() for mean in self._tenants.values()) if self._tenants else 0.0
        if self._worse.log_wealth_without_one >= limit:
            state, words = GateState.REJECTED, "the candidate is worse"
        elif (
            max(self._worse.log_wealth, self._better.log_wealth)
            >= limit
            > (self._better.log_wealth_without_one)
        ):
            words = "the difference rests on one tenant"
        elif self._better.log_wealth_without_one >= limit and middle < -margin:
            words = "most tenants see no such difference"
        elif self._better.log_wealth_without_one >= limit:
            state, words = (
                GateState.PASSED,
                f"not worse by more than {margin:g}" if margin else "the candidate is better",
            )
        words = f"{words}: reward {candidate.value():.3g}, stable {stable.value():.3g}"
        if self._users.num_uncounted:
            words += f"; {self._users.num_uncounted} replies of users over the limit not counted"
        return Gate(
            name="users",
            state=state,
            words=words,
            value=candidate.value(),
            baseline=stable.value(),
            bound=-self._config.test.margin,
            num_candidate=candidate.num,
            num_stable=stable.num,
        )

    @property
    def evidence(self) -> tuple[float, float]:
        """E-values for "better" and for "worse", capped for display."""
        better, worse = self._better.log_wealth, self._worse.log_wealth
        return math.exp(min(better, LOG_SHOWN_MAX)), math.exp(min(worse, LOG_SHOWN_MAX))

    def bounds(self) -> tuple[float, float]:
        """Return the anytime-valid confidence bounds of the difference in reward."""
        return self._differences.bounds(self._config.test.alpha)

    def arms(self, versions: dict[Arm, int]) -> list[ArmView]:
        """Return the metrics of both arms."""
        return [
            ArmView(
                arm=arm,
                policy_version=versions[arm],
                num_users=estimates.rewards.num,
                num_sessions=estimates.num_sessions,
                reward_mean=estimates.rewards.value(),
                ips=estimates.ips,
                snips=estimates.snips,
                doubly_robust=estimates.doubly_robust,
            )
            for arm, estimates in self.estimates.items()
        ]

    def missing(self, effect: float) -> tuple[int, float]:
        """Return the sessions per arm still needed to detect an effect, and the seconds they take.

        Extrapolates the variance, sessions per user and traffic so far; -1 seconds without traffic.
        """
        test, arms = self._config.test, self.estimates.values()
        num_users = sum(estimates.rewards.num for estimates in arms)
        num_sessions = sum(estimates.num_sessions for estimates in arms)
        # 1/4 is the largest variance of a reward in 0..1: pessimistic until there is an estimate.
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
        """Parse a variant; return None if it is not one of this experiment."""
        variant = parse_variant(text)
        if variant is None or variant.number != self.number:
            return None
        # A record drawn with another probability (the share was changed) would bias the weights.
        share = self._config.test.share
        expected = share if variant.arm is Arm.CANDIDATE else 1.0 - share
        return variant if math.isclose(propensity, expected) else None

    def _observe(self, observations: Iterable[Observation]) -> None:
        for observation in observations:
            match observation:
                case RunningReplyMeasures(arm, before, after):
                    for name, value in after.items():
                        self._guards[name].see(arm, before.get(name), value)
                case ReplyObservation(arm, share, replies, tenant):
                    for name, value in replies.measures().items():
                        self._guards[name].observe(arm, share, value, tenant)
                    self._tools.observe(arm, replies)
                case WindowEnd(arm, share, unrated, tenant):
                    self._guards["unrated"].see(arm, None, unrated)
                    self._guards["unrated"].observe(arm, share, unrated, tenant)
                case RewardObservation():
                    self._add_user_reward(observation)

    def _add_user_reward(self, observed: RewardObservation) -> None:
        # Centered on the mean before this user: any value known in advance keeps the test valid.
        z = weighted(observed.arm, observed.share, observed.reward - self._all.value(0.5))
        self._better.add(z, observed.tenant)
        self._worse.add(-z, observed.tenant)
        self._tenants.setdefault(observed.tenant, RunningMean()).add(z)
        self._differences.add(z)
        self._all.add(observed.reward)
        for estimate in self.estimates.values():
            estimate.add(observed.arm, observed.share, observed.reward, observed.num_rated)

    def _discard_gate(self) -> Gate:
        settings = self._config.guard("discard_rate")
        candidate, stable = self._discards[Arm.CANDIDATE], self._discards[Arm.STABLE]
        num = min(candidate.num, stable.num)
        words = (
            f"{candidate.value():.3g} to stable's {stable.value():.3g}, bound {settings.bound:g}"
        )
        state = GateState.PASSED
        if num < settings.num_min:
            state, words = GateState.WAITING, f"{words}; {num} of {settings.num_min} samples"
        elif candidate.value() - stable.value() > settings.bound:
            state = GateState.FAILED
        return Gate(
            name="discard_rate",
            state=state,
            words=words,
            value=candidate.value(),
            baseline=stable.value(),
            bound=settings.bound,
            num_candidate=candidate.num,
            num_stable=stable.num,
        )
