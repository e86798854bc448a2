"""The trainer slows when min(applied) < head - staleness_max, and the monitor says so.

Real pacer, publisher, relays and receivers on the virtual clock. The trainer takes a step as soon
as it was granted the groups of one: without the pacer's bound it would never stop.
"""

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from tests.sim.sync.world import FakeEngine, World
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer
from tests.support.virtual_clock import VirtualClock, run_virtual

from penstock.actors.generator.actor import Generator
from penstock.actors.generator.engine import EngineCapabilities, EngineHealth, EngineMetrics
from penstock.actors.generator.lag import Lag
from penstock.actors.monitor.fold import RunFold
from penstock.actors.monitor.state import MonitorState
from penstock.actors.pacer.actor import Pacer
from penstock.actors.pacer.config import PacerConfig
from penstock.actors.relay.region.relay import Relay
from penstock.actors.relay.replica.receiver import Receiver
from penstock.actors.runtime.actor import Actor
from penstock.actors.runtime.host import ActorHost
from penstock.envs.tasks.storage import tasks_key
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.task import CreditsChanged, Limits, Purpose, Split, Task
from penstock.messages.training import BatchManifest, GroupEntry, MidtrainCompleted, StepCompleted

REGIONS = ("near", "far")
GROUPS_PER_BATCH = 2
STEP_S = 1.0
LAG_S_MAX = 45.0


class HeldEngine(FakeEngine):
    """Takes no update in while it is held."""

    def __init__(self):
        super().__init__()
        self.free = asyncio.Event()
        self.free.set()
        self.version = -1

    async def commit(self, policy_version, digest=None, probe=()):
        await self.free.wait()
        pause_ms = await super().commit(policy_version, digest, probe)
        self.version = policy_version
        return pause_ms

    def health(self):
        return EngineHealth(
            ready=self.version >= 0, paused=False, policy_version=self.version, num_running=0,
            num_waiting=0,
        )  # fmt: skip

    def metrics(self):
        return EngineMetrics()

    def capabilities(self):
        return EngineCapabilities(
            name="held", num_tokens_max=1, num_running_max=1, num_waiting_max=1, arithmetic="",
            num_experts=1,
        )  # fmt: skip


class EagerTrainer(Actor):
    """Takes a step a second as long as it was granted the groups of one."""

    role = "trainer"
    follows = (CreditsChanged,)

    def __init__(self, world: World):
        self.head = 0
        self._world = world

    async def on_credits_changed(self, event, ctx):
        while event.num_groups_granted >= (self.head + 1) * GROUPS_PER_BATCH:
            await ctx.sleep(STEP_S)
            step = self.head = self.head + 1
            groups = [
                GroupEntry(group_id=f"g{n}", group_index=n, task_id="t", samples=[])
                for n in range((step - 1) * GROUPS_PER_BATCH, step * GROUPS_PER_BATCH)
            ]
            await ctx.publish(
                BatchManifest(step=step, policy_version=step - 1, groups=groups),
                await self._world.step(),
                StepCompleted(
                    step=step, policy_version=step, weights_digest="", optimizer_digest="",
                    metrics={},
                ),
            )  # fmt: skip
        return ()


class Run:
    """All of it, hosted."""

    def __init__(self, staleness_max: int):
        self.world = World(lambda name: MemoryStore())
        self.server = MemoryServer(seed=0, clock=VirtualClock())
        self.engines = {region: HeldEngine() for region in REGIONS}
        self.trainer = EagerTrainer(self.world)
        config = PacerConfig(
            groups_per_batch=GROUPS_PER_BATCH, group_size=1, staleness_max=staleness_max,
            steps_max=1000, await_baseline=False,
        )  # fmt: skip
        self.actors: dict[str, Actor] = {"pacer": Pacer(config), "trainer": self.trainer}
        for region in REGIONS:
            store = self.world.store(region)
            self.actors[f"relay-{region}"] = Relay(region, store)
            engine = self.engines[region]
            self.actors[f"receiver-{region}"] = Receiver(region, region, store, engine)
            lag = Lag(staleness_max, LAG_S_MAX)
            self.actors[f"generator-{region}"] = Generator(
                engine, [Purpose.TRAIN], region, region, lag=lag
            )

    def bus(self, name: str) -> MemoryBus:
        return MemoryBus(self.server, run_id="r", store=self.world.origin, name=name)

    async def start(self) -> list[asyncio.Task]:
        task = Task(task_id="t", category="r", split=Split.TRAIN, instruction="", files={},
                    limits=Limits())  # fmt: skip
        tasks = msgspec.msgpack.encode([task])
        for split in (Split.TRAIN, Split.HELDOUT):
            await self.world.origin.put(tasks_key(split), tasks)
        midtrained = MidtrainCompleted(
            num_tokens=1, loss_first=2.0, loss_last=1.0, heldout_loss=1.0,
            heldout_perplexity=3.0, weights_digest="d", wall_s=1.0,
        )  # fmt: skip
        await self.bus("test").publish([midtrained, await self.world.step()])
        return [asyncio.create_task(self.host(n, a)) for n, a in self.actors.items()]

    async def host(self, name: str, actor: Actor) -> None:
        clock = VirtualClock()
        host = ActorHost(
            actor, self.bus(name), self.world.origin, name=name, seed=0, clock=clock,
            incarnation="1",
        )  # fmt: skip
        await host.run(asyncio.Event())

    async def state(self) -> MonitorState:
        """Return what `penstock status` and the page show now."""
        fold = RunFold()
        async for delivery in self.bus("monitor").follow(fold.types, stop_at_end=True):
            fold.apply(delivery.event, delivery.stored_at)
        return fold.state(VirtualClock().now())


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(600.0):
        while not is_so():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("staleness_max", [0, 2])
def test_the_trainer_slows_when_a_replica_is_staleness_max_behind_the_head(staleness_max):
    async def scenario():
        run = Run(staleness_max)
        tasks = await run.start()
        await until(lambda: run.trainer.head >= 4)
        far, near = run.engines["far"], run.engines["near"]
        far.free.clear()
        await asyncio.sleep(20.0)
        served = (await run.state()).staleness.policy_version
        stopped_at = run.trainer.head
        assert stopped_at == served + staleness_max + 1
        assert run.world.converged(near)
        await asyncio.sleep(20.0)
        assert run.trainer.head == stopped_at
        words = (await run.state()).stall.words
        assert f"it is at version {stopped_at}" in words
        assert f"the slowest replica (far/far) at {served}" in words
        assert f"staleness_max is {staleness_max}" in words
        far.free.set()
        await until(lambda: run.trainer.head > stopped_at + 8)
        for task in tasks:
            assert not task.done() or task.result() is None
            task.cancel()

    run_virtual(scenario())


def test_a_run_that_no_replica_holds_back_does_not_blame_weights():
    async def scenario():
        run = Run(staleness_max=2)
        tasks = await run.start()
        await until(lambda: run.trainer.head >= 4)
        for engine in run.engines.values():
            engine.free.clear()
        await asyncio.sleep(20.0)
        assert "weights hold" in (await run.state()).stall.words
        for engine in run.engines.values():
            engine.free.set()
        head = run.trainer.head
        await until(lambda: run.trainer.head > head)
        state = await run.state()
        while state.run.step > state.staleness.policy_version + 2:
            await asyncio.sleep(0.001)
            state = await run.state()
        assert "weights hold" not in state.stall.words
        for task in tasks:
            task.cancel()

    run_virtual(scenario())


@pytest.mark.parametrize("how", ["silent", "never there"])
def test_a_lost_replica_stops_nothing_but_itself(how):
    async def scenario():
        run = Run(staleness_max=2)
        run.engines["far"].free = asyncio.Event()
        if how == "silent":
            run.engines["far"].free.set()
        tasks = dict(zip(run.actors, await run.start(), strict=True))
        await until(lambda: run.trainer.head >= 4)
        tasks["generator-far"].cancel()
        run.engines["far"].free.clear()
        await asyncio.sleep(15.0)
        head = run.trainer.head
        await until(lambda: run.trainer.head > head + 4)
        if how == "silent":
            region = (await run.state()).regions["far"]
            assert (region.lost, region.replicas["far"] < head) == (["far"], True)
        for task in tasks.values():
            task.cancel()

    run_virtual(scenario())


def test_a_region_without_a_relay_holds_the_run_back_no_longer_than_lag_s_max():
    async def scenario():
        run = Run(staleness_max=2)
        tasks = dict(zip(run.actors, await run.start(), strict=True))
        await until(lambda: run.trainer.head >= 4)
        tasks["relay-far"].cancel()
        await asyncio.sleep(LAG_S_MAX / 2)
        head, served = run.trainer.head, run.engines["far"].version
        assert head == served + 3, "its weights are too old for one more batch"
        await asyncio.sleep(LAG_S_MAX)
        await until(lambda: run.trainer.head > head + 4)
        assert run.engines["far"].version == served
        relay = Relay("far", run.world.store("far"))
        tasks["relay-far"] = asyncio.create_task(run.host("relay-far", relay))
        await until(lambda: run.engines["far"].version > head + 4)
        for task in tasks.values():
            task.cancel()

    run_virtual(scenario())
