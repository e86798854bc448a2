"""How many round trips to the origin a version takes a relay, on the virtual clock."""

import asyncio

import msgspec
from tests.sim.sync.world import FakeContext, World
from tests.support.virtual_clock import run_virtual

from penstock.actors.relay.core.version_head import NO_HEAD, read_head, read_head_after
from penstock.actors.relay.region.compactor import Compactor
from penstock.actors.relay.region.relay import Relay
from penstock.infra.stores.memory import MemoryStore


class FarStore:
    """Another store, a second away; a kilobyte takes half a minute more."""

    def __init__(self, near):
        self._near = near
        self.put, self.delete = near.put, near.delete
        self.brought = []

    async def get(self, key):
        await asyncio.sleep(1.0)
        data = await self._near.get(key)
        await asyncio.sleep(30 * (len(data) // 1024))
        self.brought.append(key)
        return data

    async def keys(self, prefix):
        await asyncio.sleep(1.0)
        return await self._near.keys(prefix)


async def far_relay(world):
    context = FakeContext(FarStore(world.origin))
    relay = Relay("west", MemoryStore())
    await relay.start(context)
    return relay, context


def test_a_relay_that_keeps_up_takes_one_round_trip_a_version():
    async def main():
        world = World(lambda name: MemoryStore())
        relay, context = await far_relay(world)
        now_s = asyncio.get_running_loop().time
        took_s = []
        for _ in range(5):
            manifest = await world.step()
            began_s = now_s()
            await relay.on_weights_published(manifest, context)
            took_s.append(now_s() - began_s)
        assert took_s[1:] == [1.0] * 4

    run_virtual(main())


def test_what_was_fetched_ahead_of_a_refusal_is_nothing_to_anyone():
    async def main():
        world = World(lambda name: MemoryStore())
        relay, context = await far_relay(world)
        await world.steps(2)
        await world.relay(relay)
        stale = await world.step()
        world.publisher = world.new_publisher()
        await world.step()
        old = msgspec.structs.replace(stale, policy_version=9, fencing_token=0)
        await relay.on_weights_published(old, context)
        assert relay._version == stale.base_version
        assert not await relay._local.keys("weights/00000002/delta/manifest")
        await relay.on_weights_published(world.manifests[-1], context)
        assert relay._version == 3

    run_virtual(main())


def test_a_relay_that_joins_late_does_not_fetch_version_0_beside_the_newer_anchor():
    async def main():
        world = World(lambda name: MemoryStore())
        await world.steps(66)
        compactor = Compactor(1)
        await compactor.start(world.context)
        for manifest in world.manifests:
            await compactor.on_weights_published(manifest, world.context)
        relay, context = await far_relay(world)
        await relay.on_weights_published(world.manifests[0], context)
        assert relay._version == 65
        weights = [shard.object_key for shard in world.manifests[0].shards if shard.extents]
        assert len(weights) == 1 and weights[0] not in context.store.brought

    run_virtual(main())


async def test_the_head_is_found_from_any_slot_that_was_known_before():
    """Some slots are claims: of those no commit deletes the one of 64 slots before."""
    world = World(lambda name: MemoryStore())
    assert await read_head_after(world.origin, NO_HEAD) == NO_HEAD
    known = [NO_HEAD]
    for number in range(140):
        if number % 7 == 3:
            world.publisher = world.new_publisher()
        await world.step()
        known.append(await read_head(world.origin))
    for slot in known:
        assert await read_head_after(world.origin, slot) == known[-1]
