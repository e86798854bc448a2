"""The trainer under the real host and bus protocol: started, killed, started again, replayed."""

import asyncio
import contextlib

from tests.sealed import open_vault
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer

from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.publisher import Publisher
from penstock.actors.runtime.clock import SystemClock
from penstock.actors.runtime.host import ActorHost
from penstock.actors.trainer.actor import Trainer
from penstock.actors.trainer.engines.local import LocalEngine
from penstock.actors.trainer.replay import REPLAY_TYPES, ReplayLog, replay
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.control import RunFinished
from penstock.messages.reading.trajectories import last_of
from penstock.messages.training import BatchManifest, CheckpointSaved, StepCompleted
from penstock.messages.weights import WeightsPublished

DEADLINE_S = 30.0


class Run:
    def __init__(self, world):
        self.world = world
        self.policy = world.trainer()._policy_config
        self.server = MemoryServer(seed=1, clock=SystemClock())
        self.store = MemoryStore()
        self.bus = self.connect("test")
        self.num_starts = 0

    def connect(self, name):
        return MemoryBus(self.server, run_id="r", store=self.store, name=name)

    async def fill(self, num_groups):
        """Put mid-training's tokens and finished rollouts of version 0 on the log."""
        for key, data in self.world.store.objects.items():
            await self.store.put(key, data)
        for index in range(num_groups):
            for member in range(3):
                await self.bus.publish(self.world._rollout(index, member, 0))

    def start(self, stop):
        self.num_starts += 1
        publisher = Publisher(StoreIO(self.store))
        engine = LocalEngine(self.world.policy, self.world.config, publisher)
        trainer = Trainer(self.world.config, self.world.policy, engine, seed=7, opener=open_vault())
        name = f"trainer-{self.num_starts}"
        host = ActorHost(
            trainer, self.connect(name), self.store, name="trainer", seed=7, incarnation=name
        )
        return asyncio.create_task(host.run(stop))

    async def until(self, event_type):
        async with asyncio.timeout(DEADLINE_S):
            async for delivery in self.bus.follow([event_type]):
                return delivery.event

    async def log(self, event_type):
        return [d.event async for d in self.bus.follow([event_type], stop_at_end=True)]


async def kill(task):
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_it_is_killed_goes_on_and_replays(make_world):
    run = Run(make_world(staleness_max=20, steps_max=8, checkpoint_steps=3))
    await run.fill(num_groups=72)
    first = run.start(asyncio.Event())
    await run.until(StepCompleted)
    await kill(first)
    stop = asyncio.Event()
    second = run.start(stop)
    finished = await run.until(RunFinished)
    stop.set()
    await asyncio.wait_for(second, DEADLINE_S)
    assert finished.step == 8
    assert [event.step for event in await run.log(StepCompleted)] == list(range(1, 9))
    assert [event.step for event in await run.log(BatchManifest)] == list(range(1, 9))
    assert [event.policy_version for event in await run.log(WeightsPublished)] == list(range(9))
    saved = [event.step for event in await run.log(CheckpointSaved)]
    assert saved == sorted({0, 3, 6, 8} | set(saved))
    log = ReplayLog(
        deliveries=run.bus.follow(REPLAY_TYPES, stop_at_end=True),
        last=last_of(run.bus),
        store=run.store,
        opener=open_vault(),
    )
    report = await replay(log, run.policy, run.world.config)
    assert (report.first_difference, report.identical, report.steps) == ("", True, 8)


async def test_an_orderly_stop_before_the_end_saves_and_a_later_start_goes_on(make_world):
    run = Run(make_world(staleness_max=20, steps_max=30, checkpoint_steps=100))
    await run.fill(num_groups=12)
    stop = asyncio.Event()
    task = run.start(stop)
    await run.until(StepCompleted)
    stop.set()
    await asyncio.wait_for(task, DEADLINE_S)
    step = (await run.log(StepCompleted))[-1].step
    assert (await run.log(CheckpointSaved))[-1].step == step
    again = run.start(asyncio.Event())
    await run.fill(num_groups=60)
    async with asyncio.timeout(DEADLINE_S):
        async for delivery in run.bus.follow([StepCompleted]):
            if delivery.event.step > step:
                break
    await kill(again)
