"""Whoever is behind goes the shortest path, and the trainer uploads nothing for it."""

import itertools

import msgspec
import numpy as np
import pytest
from tests.sim.sync.world import Adam, FakeEngine, World

from penstock.actors.relay.core.catalog import (
    NOTHING,
    Catalog,
    Rates,
    num_bytes,
    shortest_update_path,
)
from penstock.actors.relay.region.compactor import Compactor
from penstock.actors.relay.region.retention import MERGE_SPANS
from penstock.actors.relay.replica.receiver import Receiver
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.weights import SnapshotKind, WeightsPublished

SIZE = 1 << 15


def adam_world() -> World:
    world = World(lambda name: MemoryStore(), shapes={"w": (SIZE,)})
    adam = Adam(SIZE)

    def train():
        if world.manifests:
            world.weights["w"] = adam.step(world.weights["w"]).astype(np.float32)

    world.train = train
    return world


async def test_catching_up_over_64_versions_takes_less_than_half_of_the_chain():
    world = adam_world()
    relay, store = await world.region("west")
    catalog = Catalog(store)
    shares = []
    for end in range(129):
        await world.step()
        await world.relay(relay, end)
        if end >= 64:
            await catalog.refresh()
            path = shortest_update_path(catalog.manifests, end - 64, end, Rates())
            assert all(manifest.kind is not SnapshotKind.FULL for manifest in path)
            chain = world.history(end) - world.history(end - 64)
            shares.append(sum(map(num_bytes, path)) / chain)
    assert len(shares) == 65
    assert max(shares) <= 0.5


async def test_a_late_joiner_at_lag_200_takes_a_full_snapshot_and_few_merged_deltas():
    world = World(lambda name: MemoryStore())
    relay, store = await world.region("west")
    early, engine = FakeEngine(), FakeEngine()
    behind = Receiver("west", "early", store, early)
    for _ in range(203):
        await world.step()
        await world.relay(relay, len(world.manifests) - 1)
        if len(world.manifests) == 3:
            await world.wake(behind)
    uploaded = dict.fromkeys(await world.origin.keys("weights/"))
    (applied,) = await world.wake(Receiver("west", "late", store, engine), 3)
    assert world.converged(engine) and applied.policy_version == 202
    (applied,) = await world.wake(behind)
    assert world.converged(early) and applied.from_version == 2
    assert applied.num_bytes < world.history(202)
    assert dict.fromkeys(await world.origin.keys("weights/")) == uploaded
    full_versions = [m for m in world.manifests if m.kind is SnapshotKind.FULL]
    assert len(full_versions) == 1


async def test_who_became_late_while_loading_joins_no_rotation_before_it_has_caught_up():
    world = World(lambda name: MemoryStore())
    relay, store = await world.region("west")
    await world.steps(4)
    await world.relay(relay)
    engine = FakeEngine()
    get, commit, committed = store.get, engine.commit, []

    async def slowly(key):
        if "/full/1-" in key and len(world.manifests) == 4:
            await world.steps(5)
            await world.relay(relay, 4)
        return await get(key)

    async def noted(version, digest=None, probe=()):
        committed.append((version, len(world.manifests) - 1))
        return await commit(version, digest, probe)

    store.get, engine.commit = slowly, noted
    await world.wake(Receiver("west", "late", store, engine, staleness_max=2))
    assert committed == [(8, 8)]


async def test_a_region_whose_relay_and_store_are_lost_is_filled_again_from_the_origin():
    world = World(lambda name: MemoryStore())
    await world.steps(30)
    relay, store = await world.region("west")
    await relay.on_weights_published(world.manifests[2], world.context)
    engine = FakeEngine()
    await world.wake(Receiver("west", "0", store, engine))
    assert world.converged(engine)
    world.stores.clear()
    relay, store = await world.region("west")
    await relay.on_weights_published(world.manifests[29], world.context)
    await world.wake(Receiver("west", "0", store, engine))
    assert world.converged(engine)
    assert await store.keys("weights/00000029/delta/manifest-")


async def test_where_the_origin_keeps_not_everything_a_new_region_takes_its_anchor():
    world = World(lambda name: MemoryStore())
    compactor = Compactor(num_versions_kept=10)
    await compactor.start(world.context)
    for _ in range(137):
        await compactor.on_weights_published(await world.step(), world.context)
    keys = [k for k in await world.origin.keys("weights/") if "/head/" not in k]
    versions = {int(key.split("/")[1]) for key in keys}
    assert min(versions) == 64
    assert not any("delta/manifest-" in key and "/00000064/" in key for key in keys)
    relay, store = await world.region("far")
    await relay.on_weights_published(world.manifests[-1], world.context)
    engine = FakeEngine()
    await world.wake(Receiver("far", "0", store, engine), region="far")
    assert world.converged(engine)
    publisher = world.publisher = world.new_publisher()
    manifest = await world.step()
    assert manifest.kind is SnapshotKind.DELTA and publisher is world.publisher
    await compactor.on_weights_published(world.manifests[3], world.context)


@pytest.mark.parametrize(
    ("fetch_bytes_s", "apply_bytes_s", "expected"),
    [(1.0, 1e9, ["merged"]), (1e9, 1.0, ["full"]), (1e3, 1e4, ["delta", "delta"])],
)
def test_the_way_is_chosen_by_fetching_and_by_applying(fetch_bytes_s, apply_bytes_s, expected):
    """A slow link wants the fewest bytes, a slow processor the fewest passes."""

    def edge(base, version, kind, num_bytes, full_bytes):
        shard = {
            "shard_id": 0,
            "object_key": "k",
            "num_bytes": num_bytes,
            "blake3": "",
            "codec": "",
        }
        return msgspec.convert(
            {"type": "WeightsPublished", "policy_version": version, "base_version": base,
             "kind": kind, "optimizer_step": version, "fencing_token": 1, "representation": "bf16",
             "base_root_digest": "", "target_root_digest": "", "num_params": 1, "num_changed": 1,
             "full_bytes": full_bytes, "shards": [shard]},
            WeightsPublished,
        )  # fmt: skip

    edges = [
        edge(0, 1, "delta", 1_000, 100),
        edge(1, 2, "delta", 1_000, 100),
        edge(0, 2, "merged", 1_500, 60_000),
        edge(NOTHING, 2, "full", 60_000, 50),
    ]
    rates = Rates(fetch_bytes_s=fetch_bytes_s, apply_bytes_s=apply_bytes_s)
    assert [str(m.kind) for m in shortest_update_path(edges, 0, 2, rates)] == expected


def test_spans_of_folds_nest():
    assert list(MERGE_SPANS) == sorted(MERGE_SPANS)
    assert all(b % a == 0 for a, b in itertools.pairwise(MERGE_SPANS))
