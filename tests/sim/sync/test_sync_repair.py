"""Rot in a copy: the bad tiles are found by their digests, and only they are fetched again."""

import msgspec
import numpy as np
import pytest
from tests.sim.sync.world import FakeEngine, World

from penstock.actors.relay.core.digests import TILE_ELEMENTS, decode_table, make_table
from penstock.actors.relay.replica.receiver import Receiver
from penstock.infra.stores.memory import MemoryStore
from penstock.kernels.digest import root_digest
from penstock.messages.errors import CorruptDataError
from penstock.messages.rpc import RemoteError
from penstock.messages.weights import ReadTiles, TileRef

TILE_BYTES = 2 * TILE_ELEMENTS
SHAPES = {"big": (5, TILE_ELEMENTS), "tail": (TILE_ELEMENTS + 100,), "small": (30,)}


@pytest.fixture
async def west():
    """A region at version 2 with one receiver there."""
    world = World(lambda name: MemoryStore(), shapes=SHAPES)
    relay, store = await world.region("west")
    engine = FakeEngine()
    receiver = Receiver("west", "0", store, engine)
    await world.steps(3)
    await world.relay(relay)
    await world.wake(receiver)
    assert world.converged(engine)
    return world, relay, store, receiver, engine


async def step(world, relay, receiver):
    await world.step()
    await world.relay(relay, len(world.manifests) - 1)
    return await world.wake(receiver)


async def test_repair_traffic_is_the_damaged_tiles_alone(west):
    world, relay, store, receiver, engine = west
    replica = receiver._weights.snapshot.tensors
    replica["big"][1, 7] ^= 1
    replica["big"][4, :9] ^= 0x8000
    replica["tail"][-1] ^= 4
    fetched = dict(store.num_gets)
    await step(world, relay, receiver)
    assert world.converged(engine)
    damaged = 2 * TILE_BYTES + 2 * 100
    assert damaged <= world.context.num_tile_bytes <= 2 * damaged
    assert world.context.gauges["digest_mismatches"] == 1
    full_versions = [key for key in store.num_gets if "full/" in key and "manifest" not in key]
    read_by_receiver = {key: store.num_gets[key] - fetched.get(key, 0) for key in full_versions}
    assert all(number <= 1 for number in read_by_receiver.values())  # the relay's own rebuild


async def test_with_nobody_to_ask_a_rotten_copy_begins_from_a_full_snapshot(west):
    world, relay, _store, receiver, engine = west
    receiver._weights.snapshot.tensors["small"][3] ^= 1
    world.context.services.clear()
    await step(world, relay, receiver)
    assert world.converged(engine)
    assert world.context.num_tile_bytes == 0
    assert world.context.gauges["digest_mismatches"] >= 1


async def test_wrong_tiles_are_not_written(west):
    """A relay that is wrong itself cannot make a replica wrong."""
    world, relay, _store, receiver, engine = west
    give = world.context.services["tiles.west"]

    async def wrong(message):
        async for reply in give(message):
            yield type(reply)(tile=reply.tile, data=reply.data[:-1] + b"?")

    world.context.services["tiles.west"] = wrong
    receiver._weights.snapshot.tensors["big"][0, 0] ^= 1
    await step(world, relay, receiver)
    assert world.converged(engine)


async def test_a_damaged_table_of_digests_is_no_reason_to_trust_the_copy(west):
    world, relay, store, receiver, engine = west
    receiver._weights.snapshot.tensors["big"][0, 0] ^= 1
    key = world.manifests[2].digests.object_key
    await store.damage(key)
    await world.origin.damage(key)
    await step(world, relay, receiver)
    assert world.converged(engine)


async def test_a_relay_refuses_what_it_cannot_give(west):
    _, relay, _, _, _ = west
    answer = relay.services()["tiles.west"]
    tile = TileRef("big", 0)
    for request in (
        ReadTiles(policy_version=77, tiles=[tile]),
        ReadTiles(policy_version=2, tiles=[TileRef("nothing", 0)]),
        ReadTiles(policy_version=2, tiles=[TileRef("big", -1)]),
        ReadTiles(policy_version=2, tiles=[tile] * 5000),
        RemoteError(kind="busy", error=""),
    ):
        replies = [reply async for reply in answer(request)]
        assert isinstance(replies[-1], RemoteError)


def test_a_table_names_the_tiles_that_differ():
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.integers(0, 9, (3, TILE_ELEMENTS), np.uint16),
        "b": rng.integers(0, 9, TILE_ELEMENTS + 1, np.uint32),
        "c": np.array(3, np.uint16),
        "d": np.zeros((0, 4), np.uint16),
    }
    table = make_table(tensors)
    assert table.root_digest() == root_digest(tensors)
    assert table.damaged_tiles(tensors) == []
    tensors["a"][2, 0] += 1
    tensors["b"][-1] += 1
    tensors["c"] += np.uint16(1)
    expected = [TileRef("a", 2), TileRef("b", 1), TileRef("c", 0)]
    assert table.damaged_tiles(tensors) == expected
    with pytest.raises(CorruptDataError, match="expected the table of root digest"):
        decode_table(msgspec.msgpack.encode(table), root_digest(tensors))
    with pytest.raises(CorruptDataError, match="not a table"):
        decode_table(b"junk", "")
