"""Three servers and three replicas: the whole contract, killed leaders, and what outlives them."""

import asyncio
import itertools
import random
from pathlib import Path

import nats
import pytest
from tests.contract.bus.bus_world import progress, saved, step, take, task
from tests.contract.bus.check_bus import CHECKS
from tests.contract.bus.nats_cluster import NatsCluster
from tests.contract.stores.check_store import CHECKS as STORE_CHECKS

from penstock.infra.bus.jetstream.access import Access, open_access
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.settings import BusSection
from penstock.infra.config.settings import RunConfig
from penstock.infra.run.roles import work_queues
from penstock.infra.stores.directory import DirectoryStore
from penstock.infra.stores.jetstream import JetStreamStore
from penstock.messages.base import Stream
from penstock.messages.errors import BusError, ConfigError, DeadlineError
from penstock.messages.task import StartRollout
from penstock.messages.telemetry import MidtrainProgressed
from penstock.messages.training import CheckpointSaved, StepCompleted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DEADLINE_S = 60.0
RUN = "r1"


class ClusterWorld:
    """One cluster; each test has a run of its own."""

    def __init__(self, cluster: NatsCluster, folder: Path, **fields: object) -> None:
        self.cluster = cluster
        self.store = DirectoryStore(folder / "objects")
        self.buses: list[NatsBus] = []
        self._fields = fields
        self._names = itertools.count()

    @property
    def access(self) -> Access:
        section = {"num_replicas": 3, "max_bytes": 1 << 30, "servers": self.cluster.servers}
        return open_access(BusSection(**(section | self._fields)))

    async def bus(self, name: str = "tester") -> NatsBus:
        bus = await NatsBus.connect(self.access, run_id=RUN, store=self.store, name=name)
        await bus.provision()
        self.buses.append(bus)
        return bus

    async def inject(self, stream: Stream, suffix: str, data: bytes) -> None:
        client = await nats.connect(self.cluster.servers[0])
        await client.jetstream().publish(f"ps.{RUN}.{stream}.{suffix}", data)
        await client.close()

    async def restart_server(self) -> None:
        """Kill -9 the leader of two streams, and all servers at every second call."""
        if next(self._names) % 2:
            indices = range(3)
        else:
            indices = {await self.cluster.leader(f"PS_{name}") for name in ("TRAINING", "METRICS")}
        for index in indices:
            self.cluster.kill(index)
        for index in indices:
            self.cluster.start(index)

    async def close(self) -> None:
        for bus in self.buses:
            await bus.close()


@pytest.fixture
async def world(tmp_path):
    cluster = NatsCluster(tmp_path)
    await cluster.start_all()
    world = ClusterWorld(cluster, tmp_path)
    yield world
    await world.close()
    cluster.stop()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_three_replicas_conform(check, world):
    await check(world)


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_a_bucket_of_three_replicas_conforms(check, world):
    store = await JetStreamStore.connect(world.access, "objects")
    try:
        info = await world.cluster.ask(0, "$JS.API.STREAM.INFO.OBJ_objects")
        assert info["config"]["num_replicas"] == 3
        await check(store)
    finally:
        await store.close()


async def test_a_reader_of_a_stream_in_memory_starts_over_after_all_servers_were_restarted(world):
    """The cluster remembers the stream and when it was made, and forgets what it held."""
    bus, reader = await world.bus("a"), await world.bus("b")
    for n in range(5):
        await bus.publish([progress(n)])
    deliveries = reader.follow([MidtrainProgressed])
    assert len(await take(deliveries, 5)) == 5
    before = await world.cluster.ask(0, "$JS.API.STREAM.INFO.PS_METRICS")
    for index in range(3):
        world.cluster.kill(index)
    for index in range(3):
        world.cluster.start(index)
    await world.cluster.until_ready()
    await bus.publish([progress(9)])
    async with asyncio.timeout(DEADLINE_S):
        delivery = await anext(deliveries)
    after = await world.cluster.ask(0, "$JS.API.STREAM.INFO.PS_METRICS")
    assert (delivery.event, delivery.sequence) == (progress(9), 1)
    assert after["created"] == before["created"]


async def test_a_reader_of_a_stream_in_memory_misses_and_repeats_nothing_over_leaders(world):
    bus, reader = await world.bus("a"), await world.bus("b")
    deliveries = reader.follow([MidtrainProgressed])
    for n in range(4):
        await bus.publish([progress(2 * n)])
        index = await world.cluster.leader("PS_METRICS")
        world.cluster.kill(index)
        await bus.publish([progress(2 * n + 1)])
        async with asyncio.timeout(DEADLINE_S):
            found = [(await anext(deliveries)).event for _ in range(2)]
        assert found == [progress(2 * n), progress(2 * n + 1)]
        world.cluster.start(index)
        await world.cluster.until_ready()


class Load:
    """Publishes until a stop request, works and follows, and counts what came of it."""

    def __init__(self, publisher: NatsBus, worker: NatsBus, reader: NatsBus) -> None:
        self._buses = publisher, worker, reader
        self.num = 0
        self.is_over = False
        self.done: list[int] = []
        self.followed: list[int] = []

    async def publish(self) -> None:
        while not self.is_over:
            n, self.num = self.num, self.num + 1
            await self._again(self._buses[0], [task(n), step(2 * n), step(2 * n + 1)])
            await asyncio.sleep(0.05)

    async def work(self) -> None:
        items = self._buses[1].consume("workers", [StartRollout], num_pending_max=8, ack_wait_s=3.0)
        async for item in items:
            n = int(item.delivery.event.rollout_id[1:])
            receipt = await self._again(self._buses[1], [saved(n)])
            self.done += [n] * (not receipt)
            await item.ack()

    async def follow(self) -> None:
        async for delivery in self._buses[2].follow([StepCompleted]):
            self.followed.append(delivery.event.step)

    async def _again(self, bus: NatsBus, events: list) -> bool:
        """Publish; return whether the last one was a duplicate."""
        while True:
            try:
                return (await bus.publish(events))[-1].is_duplicate
            except (BusError, DeadlineError):
                await asyncio.sleep(0.2)

    @property
    def is_complete(self) -> bool:
        return len(self.done) >= self.num and len(self.followed) >= 2 * self.num


async def test_killed_leaders_lose_and_double_nothing(world):
    load = Load(*[await world.bus(name) for name in ("a", "b", "c")])
    background = [asyncio.create_task(act()) for act in (load.work, load.follow)]
    publishing = asyncio.create_task(load.publish())
    dice = random.Random(1)
    for _ in range(4):
        await asyncio.sleep(dice.uniform(0.1, 0.5))
        index = await world.cluster.leader("PS_TRAINING")
        world.cluster.kill(index)
        await asyncio.sleep(0.5)
        world.cluster.start(index)
        await world.cluster.until_ready()
    load.is_over = True
    async with asyncio.timeout(DEADLINE_S):
        await publishing
        while not load.is_complete:
            assert not any(one.done() for one in background), [one.result() for one in background]
            await asyncio.sleep(0.1)
    for one in background:
        one.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    assert sorted(load.done) == list(range(load.num))
    assert load.followed == list(range(2 * load.num))
    stored = world.buses[0].follow([CheckpointSaved], stop_at_end=True)
    assert len([delivery async for delivery in stored]) == load.num


async def test_a_token_of_a_file_reaches_servers_discovered_later(tmp_path):
    """The server that was named dies for good; the client goes to one it was told of."""
    cluster = NatsCluster(tmp_path, options='authorization { token: "s3cret" }')
    cluster.token = "s3cret"
    (tmp_path / "token").write_text("s3cret")
    await cluster.start_all()
    fields = {"servers": cluster.servers[:1], "token_file": str(tmp_path / "token")}
    world = ClusterWorld(cluster, tmp_path, **fields)
    try:
        bus = await world.bus()
        await bus.publish([step(1)])
        cluster.kill(0)
        async with asyncio.timeout(DEADLINE_S):
            (receipt,) = await bus.publish([step(2)])
        assert not receipt.is_duplicate
    finally:
        await world.close()
        cluster.stop()


async def test_a_run_with_fewer_replicas_takes_none_from_others(world):
    await world.bus()
    access = open_access(BusSection(servers=world.cluster.servers, max_bytes=1 << 30))
    bus = await NatsBus.connect(access, run_id="r2", store=world.store, name="other")
    with pytest.raises(ConfigError, match=r"bus\.num_replicas: .*has 3.* expected as many, got 1"):
        await bus.provision()
    await bus.close()


async def test_the_lag_of_shared_work_is_known_before_any_worker_is_up(world):
    bus = await world.bus()
    config = RunConfig(processes={"w": ["rollout_worker", "judge", "pacer"]}, regions=[])
    queues = work_queues(config)
    assert sorted(queues) == ["judge", "rollout_worker"]
    for durable, types in queues.items():
        await bus.provision_work(durable, types, ack_wait_s=15.0)
    await bus.publish([task(n) for n in range(5)])

    async def lag() -> tuple[int, int]:
        call = f"$JS.API.CONSUMER.INFO.PS_TASKS.{RUN}-rollout_worker"
        info = await world.cluster.ask(0, call)
        return info["num_pending"], info["num_ack_pending"]

    async def until(expected: tuple[int, int]) -> None:
        """Wait for it: the consumer's server may learn of an event after its publisher."""
        async with asyncio.timeout(DEADLINE_S):
            while await lag() != expected:
                await asyncio.sleep(0.1)

    await until((5, 0))
    items = bus.consume("rollout_worker", [StartRollout], num_pending_max=2, ack_wait_s=15.0)
    await take(items, 2)
    await until((3, 2))
