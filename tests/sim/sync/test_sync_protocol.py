"""Publisher, relays and receivers over real directories, with every fault between them."""

import random

import numpy as np
import pytest
from tests.sim.sync.world import SHAPES, FakeEngine, World, bits, manifest_in

from penstock.actors.relay.core.store_io import DamagedStoreError
from penstock.actors.relay.replica.receiver import QuarantinedError, Receiver
from penstock.infra.stores.directory import DirectoryStore
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.weights import (
    SnapshotKind,
    WeightsApplied,
    WeightsPublished,
    WeightsRelayed,
)


@pytest.fixture
def world(tmp_path):
    return World(lambda name: DirectoryStore(tmp_path / name))


async def test_two_regions_follow_every_version_bit_for_bit(world):
    regions = {name: await world.region(name) for name in ("west", "east")}
    engines = {name: FakeEngine() for name in regions}
    receivers = {n: Receiver(n, "0", regions[n][1], engines[n]) for n in regions}
    for version in range(12):
        manifest = await world.step()
        for name, (relay, _) in regions.items():
            await relay.on_weights_published(manifest, world.context)
            (applied,) = await world.wake(receivers[name], region=name)
            assert world.converged(engines[name])
            assert applied.root_digest == manifest.target_root_digest
            assert (applied.policy_version, applied.from_version) == (version, version - 1)
            assert applied.digest_matches
    assert [m.kind for m in world.manifests] == [SnapshotKind.FULL] + [SnapshotKind.DELTA] * 11
    fetched = [key for m in world.manifests for key in (s.object_key for s in m.shards)]
    assert {key: world.origin.num_gets[key] for key in fetched} == dict.fromkeys(fetched, 2)
    assert all(engine.num_whole == len(SHAPES) for engine in engines.values())
    relayed = [e for e in world.context.published if isinstance(e, WeightsRelayed)]
    assert len({event.key() for event in relayed}) == 24


async def test_duplicate_and_reordered_events_change_nothing(world):
    relay, store = await world.region("west")
    engine = FakeEngine()
    receiver = Receiver("west", "0", store, engine)
    await world.steps(20)
    order = world.manifests * 2
    random.Random(3).shuffle(order)
    for manifest in order:
        await relay.on_weights_published(manifest, world.context)
    events = [e for e in world.context.published if isinstance(e, WeightsRelayed)]
    random.Random(4).shuffle(events)
    applied = [a for e in events for a in await receiver.on_weights_relayed(e, world.context)]
    assert [a.policy_version for a in applied] == [19]
    assert world.converged(engine)
    assert await world.wake(receiver, 4) == ()
    assert await world.wake(receiver, 19, region="east") == ()


async def test_dropped_events_are_made_up_for_by_the_next_one(world):
    """Of ten versions the relay hears of two, and the receiver of one."""
    relay, store = await world.region("west")
    engine = FakeEngine()
    receiver = Receiver("west", "0", store, engine)
    await world.steps(10)
    for version in (4, 9):
        await relay.on_weights_published(world.manifests[version], world.context)
    (applied,) = await world.wake(receiver)
    assert world.converged(engine) and applied.policy_version == 9


async def test_a_late_joiner_at_lag_20_takes_folds_and_the_trainer_uploads_nothing(world):
    relay, store = await world.region("west")
    await world.steps(21)
    await world.relay(relay)
    uploaded = await world.origin.keys("")
    engine = FakeEngine()
    (applied,) = await world.wake(Receiver("west", "late", store, engine), 3)
    assert world.converged(engine)
    assert applied.policy_version == 20
    chain = sum(shard.num_bytes for m in world.manifests for shard in m.shards)
    assert applied.num_bytes < chain
    assert await world.origin.keys("") == uploaded


async def test_the_region_keeps_two_anchors_and_a_far_replica_still_converges():
    world = World(lambda name: MemoryStore())
    relay, store = await world.region("west")
    engine, late = FakeEngine(), FakeEngine()
    receiver = Receiver("west", "0", store, engine)
    await world.steps(3)
    await world.relay(relay)
    await world.wake(receiver)
    for version in range(3, 130):
        await world.step()
        await world.relay(relay, version)
    versions = {int(key.split("/")[1]) for key in await store.keys("weights/")}
    assert min(versions) == 64
    assert await manifest_in(world.origin, "00000001/delta")
    await world.wake(receiver)
    await world.wake(Receiver("west", "1", store, late))
    assert world.converged(engine)
    assert world.converged(late)
    relay, _ = await world.region("west")
    fetched = dict(world.origin.num_gets)
    await world.relay(relay)
    assert world.origin.num_gets == fetched


async def test_a_flipped_bit_in_transit_is_fetched_again(world):
    relay, store = await world.region("west")
    await world.steps(2)
    world.origin.num_flips = 3
    await world.relay(relay)
    engine = FakeEngine()
    await world.wake(Receiver("west", "0", store, engine))
    assert world.converged(engine)
    assert world.context.slept_s > 0


async def test_a_damaged_origin_object_stops_the_relay_with_its_name(world):
    relay, store = await world.region("west")
    await world.steps(2)
    key = world.manifests[1].shards[0].object_key
    await world.origin.damage(key)
    with pytest.raises(DamagedStoreError, match=key):
        await world.relay(relay)
    assert not await store.keys("weights/00000001/delta/manifest")


@pytest.mark.parametrize("what", ["delta", "torn", "manifest", "merged", "gone"])
async def test_damage_in_the_region_is_repaired_without_the_trainer(world, what):
    relay, store = await world.region("west")
    await world.steps(12)
    await world.relay(relay)
    keys = [key for key in await store.keys("weights/") if "/manifest-" not in key]
    match what:
        case "delta":
            await store.damage(world.manifests[10].shards[0].object_key)
        case "torn":
            await store.tear(world.manifests[10].shards[0].object_key)
        case "manifest":
            await store.damage(await manifest_in(store, "00000010/delta"))
        case "merged":
            await store.damage(next(key for key in keys if "merged" in key))
        case "gone":
            for key in keys:
                await store.delete(key)
    engine = FakeEngine()
    await world.wake(Receiver("west", "0", store, engine))
    assert world.converged(engine)


async def test_a_receiver_killed_mid_apply_converges_after_a_restart(world):
    relay, store = await world.region("west")
    engine = FakeEngine()
    receiver = Receiver("west", "0", store, engine)
    await world.steps(2)
    await world.relay(relay)
    await world.wake(receiver)
    before = await engine.digest()
    await world.step()
    await world.relay(relay)
    engine.dies = True
    with pytest.raises(ConnectionResetError):
        await world.wake(receiver)
    assert await engine.digest() == before
    engine.dies = False
    for again in (receiver, Receiver("west", "0", store, engine)):
        await world.wake(again)
        assert world.converged(engine)


async def test_an_engine_that_writes_wrongly_is_reloaded_whole_then_quarantined(world):
    relay, store = await world.region("west")
    engine = FakeEngine()
    receiver = Receiver("west", "0", store, engine)
    await world.steps(2)
    await world.relay(relay)
    engine.num_wrong = 1
    await world.wake(receiver)
    assert world.converged(engine)
    assert world.context.gauges["digest_mismatches"] == 1
    await world.step()
    await world.relay(relay)
    engine.num_wrong = 2
    with pytest.raises(QuarantinedError, match="west/0"):
        await world.wake(receiver)
    (event,) = [e for e in world.context.published if isinstance(e, WeightsApplied)]
    assert not event.digest_matches


async def test_a_receiver_whose_own_copy_rots_starts_from_an_anchor(world):
    relay, store = await world.region("west")
    engine = FakeEngine()
    receiver = Receiver("west", "0", store, engine)
    await world.steps(3)
    await world.relay(relay)
    await world.wake(receiver)
    receiver._weights.snapshot.tensors["embed"][0, 7] ^= 1
    await world.step()
    await world.relay(relay)
    await world.wake(receiver)
    assert world.converged(engine)
    assert world.context.gauges["digest_mismatches"] >= 1


async def test_a_full_disk_is_waited_out_and_loses_nothing(world):
    relay, store = await world.region("west")
    await world.step()
    world.origin.num_full = 2
    store.num_full = 3
    await world.step()
    await world.relay(relay)
    engine = FakeEngine()
    await world.wake(Receiver("west", "0", store, engine))
    assert world.converged(engine)


async def test_a_disk_full_for_good_is_an_error_and_the_same_version_goes_through_later(world):
    await world.steps(2)
    snapshot = bits({name: array * np.float32(1.01) for name, array in world.weights.items()})
    world.origin.num_full = 100
    with pytest.raises(OSError, match="no space"):
        await world.publisher.prepare(2, snapshot, optimizer_step=2, config_json="")
    assert not await world.origin.keys("weights/00000002/delta/manifest")
    world.origin.num_full = 0
    manifest = await world.publisher.prepare(2, snapshot, optimizer_step=2, config_json="")
    assert manifest.base_root_digest == world.manifests[1].target_root_digest


async def test_a_relay_refuses_a_manifest_under_an_older_token_or_off_the_chain(world):
    relay, store = await world.region("west")
    await world.steps(3)
    world.publisher = world.new_publisher()
    await world.step()
    await world.relay(relay)
    assert world.manifests[3].fencing_token > world.manifests[2].fencing_token
    forged = dict(policy_version=4, base_version=3, kind=SnapshotKind.DELTA)
    good = world.manifests[3]
    fields = {name: getattr(good, name) for name in good.__struct_fields__} | forged
    base = good.target_root_digest
    for wrong in ({"fencing_token": 1, "base_root_digest": base}, {"base_root_digest": "00"}):
        stale = WeightsPublished(**(fields | wrong))
        assert await relay.on_weights_published(stale, world.context) == ()
    assert not any("00000004" in key for key in await store.keys("weights/"))
