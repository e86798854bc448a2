"""Whole runs in which late groups are trained without the tokens that are too old."""

import msgspec
import pytest
from tests.sim.trainer.test_trainer_run import check_run, ledger_of, replayed

from penstock.messages.control import RunFinished
from penstock.messages.reward import Outcome
from penstock.messages.training import BatchManifest, StepCompleted

CHANGES = {"staleness_policy": "withhold", "steps_max": 5}


@pytest.fixture(params=[0.0, 2.0])
def make_late(make_world, request):
    """Return a world whose rollouts of two turns and more began two versions before.

    Its steps go on without stragglers, or wait for them a little.
    """

    def make(seed):
        world = make_world(seed, **CHANGES, straggler_wait_s=request.param)
        draw = world.turn
        world.turn = lambda version, before=(): draw(max(0, version - 2 + len(before)), before)
        return world

    return make


def entries(world):
    return [
        (manifest, sample)
        for manifest in world.log.of(BatchManifest)
        for group in manifest.groups
        for sample in group.samples
    ]


async def test_what_is_fresh_is_trained_and_replays_to_the_same_bits(make_late):
    world = make_late(3)
    await world.run()
    check_run(world)
    parts = [sample for _, sample in entries(world) if sample.outcome.is_trained]
    assert any(sample.trained_from for sample in parts), "some are trained in part"
    whole = [sample for _, sample in entries(world) if sample.outcome is Outcome.WITHHELD]
    assert whole and all(sample.advantage == 0.0 for sample in whole)
    totals = ledger_of(world).totals()
    num_trained = sum(sum(e.staleness_tokens.values()) for e in world.log.of(StepCompleted))
    num_live = sum(
        span.num_tokens
        for manifest in world.log.of(BatchManifest)
        for sample in manifest.live
        if sample.outcome.is_trained and not sample.is_change
        for span in sample.version_spans
    )
    assert totals.trained == num_trained + num_live
    assert totals.withheld > 0
    report = await replayed(world)
    assert (report.first_difference, report.identical) == ("", True)


@pytest.mark.parametrize("seed", range(2))
async def test_killed_anywhere_it_withholds_the_same(make_late, seed):
    world = make_late(seed)
    world.log.num_until_kill = 2 + seed
    num_kills = await world.run()
    if not world.log.of(RunFinished):
        await world.run()
    assert num_kills == 1
    check_run(world)
    assert (await replayed(world)).identical


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trained_from": 0}, "trained from version 0, not"),
        ({"outcome": Outcome.WITHHELD, "advantage": 0.0}, "trained from version None, not"),
    ],
)
async def test_the_audit_finds_tokens_that_are_withheld_wrongly(make_late, changes, said):
    world = make_late(3)
    await world.run()
    manifest, sample = next((m, s) for m, s in entries(world) if s.trained_from)
    wrong = msgspec.structs.replace(sample, **changes)
    groups = [
        msgspec.structs.replace(g, samples=[wrong if s is sample else s for s in g.samples])
        for g in manifest.groups
    ]
    event = msgspec.structs.replace(manifest, groups=groups)
    world.log.deliveries = [
        msgspec.structs.replace(d, event=event) if d.event is manifest else d
        for d in world.log.deliveries
    ]
    report = await replayed(world)
    assert f"{sample.rollout_id}: {said}" in report.first_difference
