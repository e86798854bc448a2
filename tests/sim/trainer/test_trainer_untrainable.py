"""Samples that nobody can train are masked as what they are, and counted to the token."""

import msgspec
import pytest
from tests.sim.trainer.test_trainer_run import ledger_of, replayed

from penstock.messages.reward import Outcome
from penstock.messages.task import Sampling
from penstock.messages.training import BatchManifest

SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "unknown": None,
    "unsaid": Sampling(top_p=0.9),
    "warm": Sampling(temperature=0.7, presence_penalty=0.5, logit_bias={3: 2.0}),
}
OUTCOMES = {
    "greedy": Outcome.GREEDY,
    "unknown": Outcome.NOT_REPRODUCIBLE,
    "unsaid": Outcome.NOT_REPRODUCIBLE,
}


@pytest.fixture
async def world(make_world):
    """Of four users in turn, each has settings of its own; so have some rollouts."""
    world = make_world(5, steps_max=4)
    world.drawn = {}
    draw, names = world.turn, list(SETTINGS)
    live, rollout = world._live, world._rollout

    def shaped(name):
        world.turn = lambda version, before=(): msgspec.structs.replace(
            draw(version, before), sampling=SETTINGS[name]
        )

    def session(index, version):
        shaped(name := names[index % 4])
        events = live(index, version)
        world.drawn[f"q{index}-0"] = name
        world.turn = draw
        return events

    def attempt(index, member, version):
        shaped(name := "warm" if (index + member) % 4 else "greedy")
        events = rollout(index, member, version)
        world.drawn[f"r{index}-{member}"] = name
        world.turn = draw
        return events

    world._live, world._rollout = session, attempt
    await world.run()
    return world


async def test_they_are_masked_by_type_and_the_rest_is_trained(world):
    outcomes = {}
    for manifest in world.log.of(BatchManifest):
        for sample in [*(s for group in manifest.groups for s in group.samples), *manifest.live]:
            name = world.drawn[sample.rollout_id]
            if name in OUTCOMES and sample.outcome is OUTCOMES[name]:
                assert sample.advantage == 0.0
            else:
                assert name == "warm" or sample.outcome.is_masked or not sample.outcome.is_trained
            outcomes.setdefault(name, set()).add(sample.outcome)
    for name, outcome in OUTCOMES.items():
        assert outcome in outcomes[name], outcomes
    assert outcomes["warm"] & {Outcome.SOLVED, Outcome.FAILED}
    ledger = ledger_of(world)
    assert ledger.violations == []
    totals = ledger.totals()
    assert totals.greedy > 0 and totals.not_reproducible > 0 and totals.trained > 0


async def test_a_replay_leaves_out_the_same(world):
    report = await replayed(world)
    assert report.identical
