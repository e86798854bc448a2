"""Simulated experiments: false decisions, and what a drop of five points costs."""

import pytest
from tests.lab.simulate.users.experiments import (
    Population,
    run_experiment,
    simulate_experiments,
)

from penstock.actors.gatekeeper.config import GatekeeperConfig, LiveTestConfig
from penstock.messages.gates import Decision

CROWD = Population(num_users=250, sessions_mean=2.0, rated_share=0.5)


def test_an_experiment_between_equals_is_held():
    # Four seeds: one false decision would already be far above 5%.
    ends = [run_experiment(seed, GatekeeperConfig(), CROWD).decision for seed in range(4)]
    assert ends == [None] * 4


@pytest.mark.parametrize(
    ("effect", "decision"), [(0.25, Decision.PROMOTED), (-0.3, Decision.ROLLED_BACK)]
)
def test_a_large_effect_is_decided_within_days(effect, decision):
    config = GatekeeperConfig(test=LiveTestConfig(sessions_per_user=1))
    population = Population(num_users=700, sessions_mean=1.0, rated_share=1.0)
    assert run_experiment(1, config, population, effect=effect).decision is decision


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_false_decisions_are_rare_and_a_planted_drop_is_rolled_back_as_power_says():
    found = simulate_experiments(100, seed=100_000)
    assert found["aa_false_decisions"] <= 0.05
    assert found["planted_rolled_back"] >= 0.7
