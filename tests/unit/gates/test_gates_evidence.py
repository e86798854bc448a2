"""The sequential test: valid under any users and any drift, and as strong as power says."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.gatekeeper.experiment import ArmEstimates, fixed_horizon_sessions, users_needed
from penstock.actors.gatekeeper.guards import BettingTest, DifferenceBounds, stakes, weighted
from penstock.actors.gatekeeper.offline import mcnemar
from penstock.messages.gates import Arm


@given(
    st.floats(0.05, 0.95), st.floats(-1.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0)
)  # fmt: skip
def test_a_bet_is_fair_for_every_user_who_is_alike_in_both_arms(share, margin, reward, mean):
    # One step of the wealth, in expectation over the coin alone: no assumption about users.
    outcomes = [(share, Arm.CANDIDATE), (1.0 - share, Arm.STABLE)]
    for k, stake in enumerate(stakes(share)):
        factors = []
        for probability, arm in outcomes:
            test = BettingTest(share, abs(margin))
            test.add(weighted(arm, share, reward - mean))
            factors.append(probability * math.exp(test._logs[k]))
        assert sum(factors) <= 1.0 + 1e-9
        assert min(factors) > 0.0, stake


@given(st.floats(0.05, 0.95), st.lists(st.tuples(st.booleans(), st.floats(0.0, 1.0)), max_size=40))
def test_wealth_is_a_number_whatever_comes(share, users):
    test = BettingTest(share, -1.0)
    for is_candidate, value in users:
        test.add(weighted(Arm.CANDIDATE if is_candidate else Arm.STABLE, share, value - 1.0))
    assert math.isfinite(test.log_wealth)


def test_the_bounds_hold_the_true_difference_and_shrink():
    drawn, widths = random.Random(3), []
    differences = DifferenceBounds(0.5)
    for i in range(4001):
        if i in {0, 250, 1000, 4000}:
            low, high = differences.bounds(0.05)
            assert low <= 0.1 <= high
            widths.append(high - low)
        arm = Arm.CANDIDATE if drawn.random() < 0.5 else Arm.STABLE
        rate = 0.5 if arm is Arm.STABLE else 0.6
        differences.add(weighted(arm, 0.5, float(drawn.random() < rate) - 0.55))
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == 2.0
    assert widths[-1] < 0.2


def _decides_within(num: int, effect: float, seed: int, num_runs: int) -> float:
    """Return the share of runs in which wealth reached 1 / 0.025 within `num` users."""
    rng = np.random.default_rng(seed)
    drawn = rng.random((num_runs, num)) < 0.5
    kept = rng.random((num_runs, num)) < np.where(drawn, 0.7 - effect, 0.7)
    z = -np.where(drawn, 2.0, -2.0) * (kept - 0.7)
    logs = np.stack([np.log1p(stake * z).cumsum(axis=1) for stake in stakes(0.5)])
    wealth = np.logaddexp.reduce(logs, axis=0) - math.log(len(logs))
    return float((wealth.max(axis=1) >= math.log(40.0)).mean())


def test_a_drop_of_five_points_shows_within_the_users_that_power_says():
    num = math.ceil(users_needed(0.05, 0.7 * 0.3, 0.5, 0.025))
    assert num < 6500
    assert _decides_within(num, 0.05, seed=1, num_runs=80) >= 0.75
    assert _decides_within(num, 0.0, seed=2, num_runs=80) <= 0.05


def test_the_published_effect_needs_about_thirteen_thousand_sessions_per_arm():
    assert 12_000 < fixed_horizon_sessions(0.7, 0.016) < 14_000
    assert users_needed(0.016, 0.21, 0.5, 0.025) / 2 == pytest.approx(30_000, rel=0.05)


def test_estimates_on_arms_of_unequal_share():
    drawn = random.Random(5)
    estimates = {arm: ArmEstimates(arm) for arm in Arm}
    for _ in range(20_000):
        arm = Arm.CANDIDATE if drawn.random() < 0.1 else Arm.STABLE
        reward = float(drawn.random() < (0.6 if arm is Arm.CANDIDATE else 0.5))
        for one in estimates.values():
            one.add(arm, 0.1, reward, 1)
    for arm, truth in ((Arm.CANDIDATE, 0.6), (Arm.STABLE, 0.5)):
        one = estimates[arm]
        assert one.ips == pytest.approx(truth, abs=0.06)
        assert one.snips == pytest.approx(truth, abs=0.04)
        assert one.doubly_robust == pytest.approx(truth, abs=0.04)
    own = estimates[Arm.CANDIDATE]
    assert own.snips == pytest.approx(own.rewards.value())


def test_mcnemar_is_exact():
    assert mcnemar(5, 0) == 1 / 32
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(2, 1) == 0.5
