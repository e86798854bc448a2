"""Whole regions on the virtual clock: kills, damage and full disks drawn from a seed."""

import asyncio
import contextlib
import random

import numpy as np
import pytest
from tests.sim.sync.ranks import assign_shards
from tests.sim.sync.world import SHAPES, FakeEngine, World, bits, offload
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import Faults, MemoryServer
from tests.support.virtual_clock import VirtualClock, run_virtual

from penstock.actors.relay.core.flat_snapshot import FlatSnapshot, tensor_table
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.core.version_head import StaleTokenError
from penstock.actors.relay.publish.publisher import Publisher
from penstock.actors.relay.publish.rank_committer import Committer
from penstock.actors.relay.publish.rank_publisher import RankPublisher
from penstock.actors.relay.publish.spans import cut_spans
from penstock.actors.relay.publish.verifier import SpanVerifier
from penstock.actors.relay.region.relay import Relay
from penstock.actors.relay.replica.receiver import Receiver
from penstock.actors.runtime.host import ActorHost
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.weights import SnapshotKind, WeightsApplied, WeightsPublished

NUM_SEEDS = 1000
NUM_FAST_SEEDS = 6
REGIONS = ("west", "east")
FAULTS = Faults(lose_receipt=0.05, latency_s_max=0.05)


class Ranks:
    """A publisher of several ranks, one of which is a new one now and then."""

    def __init__(self, store, num_ranks, dice, table) -> None:
        self._io, self._dice, self._table = StoreIO(store, offload=offload), dice, table
        self._spans = cut_spans(table, 2)
        self._layouts = assign_shards(table, num_ranks, self._spans, 500)
        self._ranks = [self._rank(number) for number in range(num_ranks)]
        self._verifiers = [
            SpanVerifier(self._io, number, span) for number, span in enumerate(self._spans)
        ]
        self._committer = Committer(self._io, num_ranks, table, self._spans)
        self._history = self._committer._history

    def _rank(self, number):
        return RankPublisher(self._io, number, self._table, self._layouts[number])

    async def prepare(self, version, snapshot, *, optimizer_step, config_json):
        token = await self._committer.begin()
        flat = FlatSnapshot.of(snapshot)
        if self._dice.random() < 0.1:
            number = self._dice.randrange(len(self._ranks))
            self._ranks[number] = self._rank(number)
        work = [verifier.verify(version, token) for verifier in self._verifiers]
        work += [
            rank.upload(version, token, [flat.part(runs) for runs in layout])
            for rank, layout in zip(self._ranks, self._layouts, strict=True)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for piece in work:
                    group.create_task(piece)
                commit = group.create_task(
                    self._committer.commit(
                        version, optimizer_step=optimizer_step, config_json=config_json
                    )
                )
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return commit.result()


class Chaos(World):
    """A world with hosts that die at random."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.num_ranks = seed % 4 if seed % 2 else 0
        super().__init__(lambda name: MemoryStore(), seed)
        self.clock = VirtualClock()
        self.server = MemoryServer(seed=seed, clock=self.clock, faults=FAULTS)
        self.engines = {f"{region}-{n}": FakeEngine() for region in REGIONS for n in range(2)}
        self.tasks: dict[str, asyncio.Task] = {}
        self.actors: dict[str, Relay | Receiver] = {}
        self.overtaken: Publisher | None = None
        self.num_starts = 0
        self.num_versions = 80 if seed % 20 == 19 else 16 + seed % 17

    def new_publisher(self):
        """Return the publisher of one process, or for every second seed one of 1 or 3 ranks."""
        if not self.num_ranks:
            return super().new_publisher()
        zeros = {name: np.zeros(shape, np.uint16) for name, shape in SHAPES.items()}
        return Ranks(self.origin, self.num_ranks, self.dice, tensor_table(zeros))

    def bus(self) -> MemoryBus:
        self.num_starts += 1
        return MemoryBus(
            self.server, run_id="r", store=self.origin, name=f"process-{self.num_starts}"
        )

    def actor(self, name: str):
        role, _, rest = name.partition(" ")
        if role == "relay":
            return Relay(rest, self.store(rest))
        region, _, replica = rest.partition("-")
        return Receiver(region, replica, self.store(region), self.engines[rest])

    def ensure(self, name: str) -> None:
        """Start an actor unless it runs; it is a new one, with nothing but the log and stores."""
        task = self.tasks.get(name)
        if task is None or task.done():
            if task is not None and not task.cancelled():
                task.exception()
            self.actors[name] = self.actor(name)
            host = ActorHost(
                self.actors[name],
                self.bus(),
                self.origin,
                name=name.replace(" ", "-"),
                seed=1,
                clock=self.clock,
                incarnation=str(self.num_starts),
            )
            self.tasks[name] = asyncio.create_task(host.run(asyncio.Event()))

    async def kill(self, name: str) -> None:
        task = self.tasks[name]
        task.cancel()
        await asyncio.wait([task])

    async def misfortune(self) -> None:
        """Let one bad thing happen."""
        region = self.dice.choice(REGIONS)
        store, engine = self.store(region), self.engines[self.dice.choice(sorted(self.engines))]
        match self.dice.randrange(12):
            case 0 | 1:
                await self.kill(self.dice.choice(sorted(self.tasks)))
            case 2:
                await self.harm_any(store, store.damage)
            case 3:
                await self.harm_any(store, store.tear)
            case 4:
                store.num_full = self.dice.randrange(1, 12)
            case 5:
                self.origin.num_full = self.dice.randrange(1, 12)
            case 6:
                self.origin.num_flips = self.dice.randrange(1, 8)
            case 7:
                engine.num_wrong = 1
            case 8:
                engine.dies = not engine.dies
            case 9:
                await self.lose_relay(region)
            case 10:
                self.rot(f"receiver {region}-0")
            case 11:
                await self.change_publisher()

    async def harm_any(self, store, harm) -> None:
        keys = await store.keys("weights/")
        if keys:
            await harm(self.dice.choice(keys))

    async def lose_relay(self, region: str) -> None:
        """Lose a relay with its store; receivers find the new, empty one."""
        await self.kill(f"relay {region}")
        for key in await self.store(region).keys(""):
            await self.store(region).delete(key)

    def rot(self, name: str) -> None:
        """Flip a bit in a running receiver's own copy."""
        replica = self.actors[name]._weights
        if replica.version >= 0:
            replica.snapshot.tensors["layers.0.mlp"][1, 2, self.dice.randrange(24)] ^= 1

    async def change_publisher(self) -> None:
        """Let a second publisher take over; the first one does not know and goes on."""
        if self.overtaken is not None:
            other = {name: array ^ 1 for name, array in bits(self.weights).items()}
            with pytest.raises(StaleTokenError):
                await self.overtaken.prepare(
                    len(self.manifests), other, optimizer_step=0, config_json="{}"
                )
            self.overtaken = None
        else:
            overtaken, self.publisher = self.publisher, self.new_publisher()
            await self.publish_again()
            self.overtaken = overtaken

    async def publish_again(self) -> None:
        """Have the newest version prepared once more: a claim, and nothing else."""
        version = len(self.manifests) - 1
        with contextlib.suppress(OSError):
            again = await self.publisher.prepare(
                version, bits(self.weights), optimizer_step=version, config_json="{}"
            )
            assert again == self.manifests[version]

    async def run(self, names: list[str]) -> None:
        bus = self.bus()
        held: list[WeightsPublished] = []
        for version in range(self.num_versions):
            for name in names:
                self.ensure(name)
            is_overtaken = version and self.dice.random() < 0.08
            manifest = await (self.be_overtaken() if is_overtaken else self.train_and_prepare())
            chance = self.dice.random() if version + 1 < self.num_versions else 1.0
            if chance < 0.1:
                continue  # the event is lost
            if chance < 0.25:
                held.append(manifest)  # it comes after a later one
            else:
                await bus.publish([manifest, *reversed(held)])
                held = []
            await asyncio.sleep(self.dice.random())
            if self.dice.random() < 0.6:
                await self.misfortune()

    async def train_and_prepare(self):
        """Publish as a trainer does that is restarted whenever its publisher fails."""
        self.train()
        return await self.prepare_at_last()

    async def prepare_at_last(self):
        while True:
            try:
                return await self.prepare()
            except OSError:
                self.publisher = self.new_publisher()

    async def be_overtaken(self):
        """Let a second publisher commit a version while the first stores other weights for it."""
        self.train()
        slow, self.publisher = self.publisher, self.new_publisher()
        known, version = slow._history.known, len(self.manifests)

        async def look_then_be_overtaken(*arguments):
            found = await known(*arguments)
            await self.prepare_at_last()
            return found

        slow._history.known = look_then_be_overtaken
        other = {name: array ^ 1 for name, array in bits(self.weights).items()}
        with pytest.raises((StaleTokenError, OSError)):
            await slow.prepare(version, other, optimizer_step=version, config_json="{}")
        if len(self.manifests) == version:  # it failed before it looked
            await self.prepare_at_last()
        return self.manifests[version]

    async def settle(self, names: list[str]) -> None:
        """Let the faults end; whoever is dead is started again."""
        self.origin.num_flips = self.origin.num_full = 0
        for store in self.stores.values():
            store.num_full = 0
        for engine in self.engines.values():
            engine.num_wrong, engine.dies = 0, False
        for _ in range(200):
            for name in names:
                self.ensure(name)
            await asyncio.sleep(1.0)
            if await self.is_settled():
                return

    async def is_settled(self) -> bool:
        """Return whether every engine is at the head and its receiver has said so."""
        bus, head = self.bus(), self.manifests[-1]
        events = [d.event async for d in bus.follow([WeightsApplied], stop_at_end=True)]
        applied = {(f"{event.region}-{event.replica}", event.root_digest) for event in events}
        for name, engine in self.engines.items():
            if (name, head.target_root_digest) not in applied:
                return False
            if not self.converged(engine):
                return False
        return True


async def live(seed: int) -> None:
    chaos = Chaos(seed)
    names = [f"relay {region}" for region in REGIONS]
    names += [f"receiver {region}-0" for region in REGIONS]
    await chaos.run(names)
    names += [f"receiver {region}-1" for region in REGIONS]  # late joiners
    await chaos.settle(names)
    for task in chaos.tasks.values():
        task.cancel()
    await asyncio.wait(chaos.tasks.values())
    for task in chaos.tasks.values():
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()
    assert await chaos.is_settled(), f"seed {seed}: not all receivers hold the head"
    full_versions = [m for m in chaos.manifests if m.kind is SnapshotKind.FULL]
    assert len(full_versions) == 1


@pytest.mark.parametrize("seed", range(NUM_FAST_SEEDS))
def test_every_receiver_ends_bit_exact(seed):
    run_virtual(live(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_FAST_SEEDS, NUM_SEEDS))
def test_every_receiver_ends_bit_exact_whatever_the_seed(seed):
    run_virtual(live(seed))
