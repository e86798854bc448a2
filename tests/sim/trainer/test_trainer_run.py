"""Whole runs of the trainer on a small world: steps, kills, replay."""

import msgspec
import pytest
from tests.sealed import open_vault

from penstock.actors.trainer.config import MidtrainConfig
from penstock.actors.trainer.replay import ReplayLog, replay
from penstock.actors.trainer.rl_phase import NondeterminismError
from penstock.messages.base import Claim
from penstock.messages.control import RunFinished
from penstock.messages.errors import NotFoundError
from penstock.messages.feedback import LiveSampleJoined
from penstock.messages.reading.claims import digest_of
from penstock.messages.reading.ledger import Ledger
from penstock.messages.reward import EvalCompleted, Outcome
from penstock.messages.rollout import RolloutFinished, SandboxRecord, TurnSampled
from penstock.messages.training import (
    BatchManifest,
    CheckpointSaved,
    MidtrainCompleted,
    StepCompleted,
)
from penstock.messages.weights import WeightsPublished


def ledger_of(world) -> Ledger:
    ledger = Ledger()
    for event in world.log.of(TurnSampled):
        ledger.add_turn(event)
    for event in world.log.of(LiveSampleJoined):
        ledger.add_live(event)
    for event in world.log.of(BatchManifest):
        ledger.add_manifest(event)
    return ledger


async def replayed(world, **options):
    config = options.pop("config", world.config)
    policy = world.trainer()._policy_config
    log = ReplayLog(
        deliveries=world.log.follow(),
        last=world.log.last,
        store=options.pop("store", world.store),
        opener=open_vault(),
    )
    return await replay(log, policy, config, **options)


def check_run(world) -> None:
    """Assert what every finished run must show, killed or not."""
    steps = [event.step for event in world.log.of(StepCompleted)]
    versions = [event.policy_version for event in world.log.of(WeightsPublished)]
    assert steps == list(range(1, world.config.steps_max + 1))
    assert versions == [0, *steps]
    trained = [
        sample.rollout_id
        for manifest in world.log.of(BatchManifest)
        for group in manifest.groups
        for sample in group.samples
    ]
    assert len(trained) == len(set(trained)) > 0
    assert ledger_of(world).violations == []
    seen = max(event.metrics["staleness_max"] for event in world.log.of(StepCompleted))
    assert seen <= world.config.staleness_max
    assert world.log.of(RunFinished) == [RunFinished(reason="steps_max", step=steps[-1])]


async def test_a_run_trains_every_step_and_replays_to_the_same_bits(make_world):
    world = make_world(3)
    await world.run()
    check_run(world)
    report = await replayed(world)
    assert (report.first_difference, report.identical) == ("", True)
    assert report.steps == report.steps_compared == world.config.steps_max
    assert report.weights_digest == world.log.of(StepCompleted)[-1].weights_digest
    live = [sample for event in world.log.of(BatchManifest) for sample in event.live]
    assert {sample.outcome for sample in live} >= {"cancelled", "solved"}
    assert any(sample.is_change for sample in live), "a revision came after training"
    assert any(sample.turn_advantages for sample in live), "a session trains by turn"


async def test_what_ran_in_a_weak_sandbox_is_accounted_for_and_not_trained(make_world):
    world = make_world()
    strong = world._rollout
    record = SandboxRecord(
        backend="process", isolation_class="process", kernel_digest="", image_digest=""
    )

    def rollout(index, member, version):
        return [
            msgspec.structs.replace(event, sandbox=record)
            if isinstance(event, RolloutFinished) and member == 0
            else event
            for event in strong(index, member, version)
        ]

    world._rollout = rollout
    await world.run()
    check_run(world)
    samples = [
        sample
        for manifest in world.log.of(BatchManifest)
        for group in manifest.groups
        for sample in group.samples
    ]
    weak = {sample.outcome for sample in samples if sample.rollout_id.endswith("-0")}
    assert weak == {Outcome.INFRASTRUCTURE_ERROR}
    assert Outcome.SOLVED in {sample.outcome for sample in samples}
    assert (await replayed(world)).identical


async def test_weights_change_and_loss_is_recorded(make_world):
    world = make_world(filter_zero_variance=True)
    await world.run()
    midtrain = world.log.of(MidtrainCompleted)[0]
    steps = world.log.of(StepCompleted)
    assert midtrain.loss_last < midtrain.loss_first
    assert midtrain.num_tokens >= 512
    assert len({midtrain.weights_digest, *(event.weights_digest for event in steps)}) > 4
    assert all(event.metrics["grad_norm"] > 0 for event in steps if event.staleness_tokens)


@pytest.mark.parametrize("seed", range(4))
async def test_killed_anywhere_it_recovers_exactly_once(make_world, seed):
    world = make_world(seed)
    num_kills = 0
    for num_until_kill in (seed, seed % 3, 4):
        world.log.num_until_kill = num_until_kill
        num_kills += await world.run()
        if world.log.of(RunFinished):
            break
    world.log.num_until_kill = float("inf")
    await world.run()
    assert num_kills >= 1
    check_run(world)
    report = await replayed(world)
    assert (report.first_difference, report.identical) == ("", True)


async def test_a_later_start_takes_the_recorded_steps_again_to_the_same_bits(make_world):
    world = make_world(checkpoint_steps=100)
    await world.run()
    digests = [event.weights_digest for event in world.log.of(StepCompleted)]
    for key in await world.store.keys("checkpoints/"):
        if not key.startswith("checkpoints/00000000-"):
            await world.store.delete(key)
    world.log.deliveries = [d for d in world.log.deliveries if not isinstance(d.event, RunFinished)]
    world.log.subjects = {d.subject for d in world.log.deliveries}
    await world.run()
    assert [event.weights_digest for event in world.log.of(StepCompleted)] == digests


async def test_another_digest_on_the_log_stops_the_trainer(make_world):
    world = make_world()
    await world.run()
    for key in await world.store.keys("checkpoints/"):
        if not key.startswith("checkpoints/00000000-"):
            await world.store.delete(key)
    world.log.deliveries = [
        msgspec.structs.replace(d, event=msgspec.structs.replace(d.event, weights_digest="0" * 32))
        if isinstance(d.event, StepCompleted) and d.event.step == 2
        else d
        for d in world.log.deliveries
        if not isinstance(d.event, RunFinished)
    ]
    world.log.subjects = {d.subject for d in world.log.deliveries}
    with pytest.raises(NondeterminismError, match="step 2"):
        await world.run()


async def test_an_orderly_stop_saves_where_it_stands(make_world):
    world = make_world(steps_max=4, checkpoint_steps=3)
    await world.run()
    assert [event.step for event in world.log.of(CheckpointSaved)] == [0, 3, 4]
    keys = await world.store.keys("checkpoints/")
    assert [int(key[12:20]) for key in keys] == [0, 4], "one besides step 0 is kept"


async def test_replay_names_the_first_difference(make_world):
    world = make_world()
    await world.run()
    faster = msgspec.structs.replace(world.config.optimizer, learning_rate=2e-3)
    other = msgspec.structs.replace(world.config, optimizer=faster).encoded()
    for place, delivery in enumerate(world.log.deliveries):
        if isinstance(delivery.event, BatchManifest):
            changed = msgspec.structs.replace(delivery.event, settings=other)
            world.log.deliveries[place] = msgspec.structs.replace(delivery, event=changed)
    report = await replayed(world)
    assert not report.identical
    assert report.first_difference.startswith("step 1: weights")


async def test_replay_checks_rewards_and_advantages(make_world):
    world = make_world()
    await world.run()
    index, first = next(
        (i, d) for i, d in enumerate(world.log.deliveries) if isinstance(d.event, BatchManifest)
    )
    group = first.event.groups[0]
    sample = next(s for s in group.samples if s.advantage)
    wrong = msgspec.structs.replace(sample, advantage=sample.advantage * 2)
    samples = [wrong if s is sample else s for s in group.samples]
    groups = [msgspec.structs.replace(group, samples=samples), *first.event.groups[1:]]
    event = msgspec.structs.replace(first.event, groups=groups)
    world.log.deliveries[index] = msgspec.structs.replace(first, event=event)
    report = await replayed(world)
    assert f"{sample.rollout_id}: advantage" in report.first_difference


async def test_a_rollout_that_cannot_be_trained_is_masked_not_fatal(make_world):
    world = make_world(steps_max=4)
    whole = world._rollout

    def without_routes(index, member, version):
        events = whole(index, member, version)
        if member == 0 and index % 2:
            turn = msgspec.structs.replace(events[0].turn, route_segments=[])
            events[0] = msgspec.structs.replace(events[0], turn=turn)
        return events

    world._rollout = without_routes
    await world.run()
    check_run(world)
    masked = {
        sample.outcome
        for manifest in world.log.of(BatchManifest)
        for group in (*manifest.groups, *manifest.discarded)
        for sample in group.samples
        if sample.rollout_id.endswith("-0") and group.group_index % 2
    }
    assert masked == {"infrastructure_error", "filtered"}, "never trained"
    assert (await replayed(world)).identical


def stores_turns(world, *, lost: str | None) -> None:
    """Have every turn lie in the store from now on, all but the one of a key."""
    whole = world._rollout

    def stored(event):
        if not isinstance(event, TurnSampled):
            return event
        data = msgspec.msgpack.encode(event.turn)
        key = f"claims/1-{event.key().replace('.', '-')}"
        claim = Claim(object_key=key, num_bytes=len(data), blake3=digest_of(data))
        if key != lost:
            world.store.objects[key] = data
        return msgspec.structs.replace(event, turn=event.turn.stored(claim))

    world._rollout = lambda *place: [stored(event) for event in whole(*place)]


async def test_turns_in_the_store_train_to_the_same_bits_and_a_lost_one_is_masked(make_world):
    """Turns that do not fit in memory, or lie in the store, are read when they are trained."""
    worlds = [make_world(5, steps_max=4), make_world(5, steps_max=4, turns_bytes_max=1)]
    stored = make_world(5, steps_max=4, turns_bytes_max=5000)
    stores_turns(stored, lost=None)
    for world in (*worlds, stored):
        await world.run()
        check_run(world)
    digests = [world.log.of(StepCompleted)[-1].weights_digest for world in (*worlds, stored)]
    assert len(set(digests)) == 1
    assert (await replayed(stored)).identical
    key = next(event.turn.object_key for event in stored.log.of(TurnSampled))
    broken = make_world(5, steps_max=4)
    stores_turns(broken, lost=key)
    await broken.run()
    check_run(broken)
    lost = next(e.rollout_id for e in broken.log.of(TurnSampled) if e.turn.object_key == key)
    samples = [
        sample
        for manifest in broken.log.of(BatchManifest)
        for group in (*manifest.groups, *manifest.discarded)
        for sample in group.samples
    ]
    outcomes = {sample.rollout_id: sample.outcome for sample in samples}
    assert not outcomes[lost].is_trained
    assert (await replayed(broken)).identical


async def test_midtraining_is_left_out_without_a_budget(make_world):
    world = make_world(steps_max=1, midtrain=MidtrainConfig(num_tokens=0))
    del world.store.objects["midtrain/tokens"]
    await world.run()
    assert world.log.of(MidtrainCompleted)[0].num_tokens == 0
    assert (await replayed(world)).identical


async def test_missing_tokens_are_named(make_world):
    world = make_world()
    del world.store.objects["midtrain/heldout"]
    with pytest.raises(NotFoundError, match="midtrain/heldout"):
        await world.run()


def evaluated(version, num_solved):
    return EvalCompleted(
        eval_id=f"e{version}", policy_version=version, num_solved=num_solved, num_tasks=4
    )


@pytest.mark.parametrize("stop", [0.0, 0.75])
async def test_it_ends_early_when_the_policy_is_good_enough(make_world, stop):
    world = make_world(pass_rate_stop=stop)
    work = world._work

    async def with_evaluations():
        version = len(world.log.of(StepCompleted))
        await world.log.publish(evaluated(version, {0: 4, 2: 3}.get(version, 2)))
        await work()

    world._work = with_evaluations
    await world.run()
    finished = world.log.of(RunFinished)[0]
    steps = [event.step for event in world.log.of(StepCompleted)]
    assert steps == list(range(1, finished.step + 1))
    assert len(world.log.of(BatchManifest)) == len(steps)
    if stop:
        assert (finished.reason, finished.step in {2, 3}) == ("pass_rate", True)
        assert world.log.of(CheckpointSaved)[-1].step == finished.step
    else:
        assert (finished.reason, finished.step) == ("steps_max", 6)
    assert (await replayed(world)).identical
