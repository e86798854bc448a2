"""Two tenants, one hostile: users whom a tenant makes up promote nothing and roll nothing back."""

import random

import pytest

from penstock.actors.gatekeeper.config import GatekeeperConfig
from penstock.actors.gatekeeper.experiment import Experiment
from penstock.actors.gatekeeper.users import RewardObservation
from penstock.messages.gates import Arm, GateState

NUM_HONEST, NUM_MADE_UP = 3000, 6000


def outcome(votes: dict[str, tuple[int, dict[Arm, float]]]) -> GateState:
    """Return the test's state after users of several tenants, each with a rate by arm."""
    experiment, draw = Experiment(0, GatekeeperConfig()), random.Random(7)
    share = GatekeeperConfig().test.share
    users = [tenant for tenant, (num, _) in votes.items() for _ in range(num)]
    draw.shuffle(users)
    for tenant in users:
        arm = Arm.CANDIDATE if draw.random() < share else Arm.STABLE
        reward = float(draw.random() < votes[tenant][1][arm])
        experiment._observe([RewardObservation(arm, share, reward, 1, tenant)])
    return experiment.test_gate().state


WORSE, BETTER = {Arm.CANDIDATE: 0.5, Arm.STABLE: 0.7}, {Arm.CANDIDATE: 0.7, Arm.STABLE: 0.5}
FOR, AGAINST = {Arm.CANDIDATE: 1.0, Arm.STABLE: 0.0}, {Arm.CANDIDATE: 0.0, Arm.STABLE: 1.0}


@pytest.mark.parametrize(("truth", "vote"), [(WORSE, FOR), (BETTER, AGAINST)])
def test_a_hostile_tenant_with_twice_as_many_users_decides_nothing(truth, vote):
    found = outcome({"honest": (NUM_HONEST, truth), "hostile": (NUM_MADE_UP, vote)})
    assert found is GateState.WAITING


def test_tenants_that_agree_decide():
    votes = {name: (NUM_HONEST, BETTER) for name in ("a", "b", "c")}
    assert outcome(votes) is GateState.PASSED
    votes = {name: (NUM_HONEST, WORSE) for name in ("a", "b", "c")}
    assert outcome(votes) is GateState.REJECTED


def test_a_single_tenant_decides_for_itself():
    assert outcome({"only": (NUM_HONEST, BETTER)}) is GateState.PASSED
