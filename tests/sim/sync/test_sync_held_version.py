"""Replicas that hold a version: evaluations, channels, pins; and what stores keep for them."""

import pytest
from tests.sim.sync.world import FakeEngine, World

from penstock.actors.relay.core.catalog import NOTHING, Catalog
from penstock.actors.relay.core.pins import Pins
from penstock.actors.relay.region.retention import FULL_EVERY
from penstock.actors.relay.replica.receiver import HeldVersion, Receiver
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.errors import ConfigError
from penstock.messages.generation import ChannelMoved
from penstock.messages.reward import EvalAnnounced, EvalCompleted


def announced(version: int) -> EvalAnnounced:
    return EvalAnnounced(eval_id=f"v{version}", policy_version=version, num_tasks=4)


def completed(version: int) -> EvalCompleted:
    return EvalCompleted(eval_id=f"v{version}", policy_version=version, num_solved=0, num_tasks=4)


def moved(number: int, **channels: int) -> ChannelMoved:
    channel, version = list(channels.items())[-1]
    return ChannelMoved(number=number, channel=channel, policy_version=version, channels=channels)


class Site:
    """A region with one receiver that holds what its channel, or an evaluation, says."""

    def __init__(self, channel: str = "newest", *, evaluates: bool = False) -> None:
        self.world = World(lambda name: MemoryStore())
        self.engine = FakeEngine()
        self.held: list[int] = []
        self.target = HeldVersion(channel, evaluates=evaluates)

    async def start(self, num_versions: int) -> None:
        self.relay, self.store = await self.world.region("west")
        self.receiver = Receiver("west", "west.a", self.store, self.engine, target=self.target)
        await self.publish(num_versions)

    async def publish(self, num_versions: int) -> None:
        """Publish versions one by one; the receiver hears of each."""
        for _ in range(num_versions):
            manifest = await self.world.step()
            await self.relay.on_weights_published(manifest, self.world.context)
            self.note(await self.world.wake(self.receiver))

    def note(self, effects) -> None:
        self.held += [event.policy_version for event in effects]

    async def announce(self, version: int) -> None:
        await self.relay.on_eval_announced(announced(version), self.world.context)
        self.note(await self.receiver.on_eval_announced(announced(version), self.world.context))

    async def complete(self, version: int) -> None:
        await self.relay.on_eval_completed(completed(version), self.world.context)
        self.note(await self.receiver.on_eval_completed(completed(version), self.world.context))


async def test_an_evaluation_holds_its_version_while_others_are_published():
    """It failed before: a replica swapped in the middle, and version 4's rate was version 5's."""
    site = Site(evaluates=True)
    await site.start(3)
    await site.announce(4)
    await site.publish(4)
    assert site.held == [0, 1, 2, 4], "it stops at 4 on the way, and neither at 3 nor at 5 or 6"
    await site.complete(4)
    assert site.held[-1] == 6
    assert site.world.converged(site.engine)


async def test_it_goes_back_where_the_announcement_is_late_and_evaluations_queue():
    site = Site(evaluates=True)
    await site.start(6)
    await site.announce(2)
    await site.announce(4)
    assert site.held[-1] == 2
    await site.complete(2)
    assert site.held[-1] == 4
    await site.complete(4)
    assert site.held[-1] == 5
    assert site.world.converged(site.engine)


async def test_a_replica_that_serves_no_evaluations_stays_at_the_newest():
    site = Site()
    await site.start(2)
    await site.announce(0)
    await site.publish(2)
    assert site.held == [0, 1, 2, 3]


async def test_a_restarted_receiver_begins_with_the_version_under_evaluation_alone():
    site = Site(evaluates=True)
    await site.start(4)
    await site.world.context.publish(announced(1), completed(1), announced(2))
    engine, target = FakeEngine(), HeldVersion(evaluates=True)
    receiver = Receiver("west", "west.a", site.store, engine, target=target)
    await receiver.start(site.world.context)
    effects = await site.world.wake(receiver)
    assert [event.policy_version for event in effects] == [2]
    late = await receiver.on_eval_announced(announced(1), site.world.context)
    assert late == (), "it is complete on the log"


async def test_a_pinned_replica_loads_exactly_its_version():
    site = Site("version:2")
    await site.start(2)
    assert site.held == []
    await site.publish(3)
    assert site.held == [2]


async def test_stable_is_the_newest_until_it_is_moved_and_then_where_it_points():
    site = Site("stable")
    await site.start(3)
    assert site.held == [0, 1, 2]
    ctx = site.world.context
    site.note(await site.receiver.on_channel_moved(moved(1, stable=1), ctx))
    site.note(await site.receiver.on_channel_moved(moved(0, stable=0), ctx))
    await site.publish(1)
    assert site.held == [0, 1, 2, 1]
    site.note(await site.receiver.on_channel_moved(moved(2, stable=1, candidate=3), ctx))
    assert site.held == [0, 1, 2, 1]


async def test_a_version_that_is_nowhere_any_more_leaves_the_replica_where_it_is():
    site = Site("stable")
    await site.start(2)
    catalog = Catalog(site.store)
    await catalog.refresh()
    for store in (site.store, site.world.origin):
        for key in [key for key in await store.keys("weights/") if "head" not in key]:
            await store.delete(key)
    effects = await site.receiver.on_channel_moved(moved(0, stable=0), site.world.context)
    assert effects == ()
    assert site.world.converged(site.engine)


async def test_a_store_keeps_what_evaluations_and_channels_need():
    pins = Pins()
    pins.announced(announced(3))
    pins.announced(announced(9))
    pins.moved(moved(0, stable=5))
    assert pins.versions == {3, 5, 9}
    pins.completed("v3")
    assert pins.versions == {5, 9}
    for channels, is_kept in (({"stable": 5}, True), ({"stable": 70}, False)):
        world = World(lambda name: MemoryStore())
        relay, store = await world.region("west")
        await relay.on_channel_moved(moved(0, **channels), world.context)
        for _ in range(2 * FULL_EVERY + 1):
            await relay.on_weights_published(await world.step(), world.context)
        catalog = Catalog(store)
        await catalog.refresh()
        assert bool(catalog.plan(NOTHING, 5)) == is_kept


@pytest.mark.parametrize("channel", ["", "latest", "version:", "version:-1", "version:x", "Stable"])
def test_an_unknown_channel_is_refused_by_name(channel):
    with pytest.raises(ConfigError, match="expected newest, stable, candidate or version:N"):
        HeldVersion(channel)
