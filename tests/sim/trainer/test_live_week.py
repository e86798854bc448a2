"""A week of a service that learns from users alone, on virtual time.

Users come by day more than by night; 70% say nothing, the others after 10 s to 3 days. Each night
the trainer is killed.
"""

import asyncio
import contextlib
import math
import random

import msgspec
import pytest
from tests.sealed import open_vault, sealed_turn
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer
from tests.support.virtual_clock import VirtualClock, run_virtual

from penstock.actors.feedback.actor import FeedbackJoiner
from penstock.actors.feedback.config import JoinConfig
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.publisher import Publisher
from penstock.actors.runtime.host import ActorHost
from penstock.actors.trainer.actor import Trainer
from penstock.actors.trainer.config import EpochConfig, LiveConfig
from penstock.actors.trainer.engines.local import LocalEngine
from penstock.actors.trainer.replay import REPLAY_TYPES, ReplayLog, replay
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.feedback import FeedbackReceived, InferenceRecorded, LiveSampleJoined
from penstock.messages.reading.trajectories import last_of
from penstock.messages.training import BatchManifest, StepCompleted

from .conftest import make_turn

DAY_S = 86_400.0
EPOCH = EpochConfig(num_samples=16, s_max=14_400.0)
NUM_REQUESTS = 1400
SILENT = 0.7
SLACK_S = 300.0
"""Of a version's time: the trainer's restart, and its ticks."""
DELAY_S_MAX = 3 * DAY_S


class Week:
    """Users, a feedback join and a trainer on one simulated bus."""

    def __init__(self, world) -> None:
        self.clock = VirtualClock()
        self.server = MemoryServer(seed=0, clock=self.clock)
        self.store = MemoryStore()
        self.objects = world.store.objects
        self.config = msgspec.structs.replace(
            world.config,
            epoch=EPOCH,
            steps_max=1_000_000,
            staleness_max=1_000,
            batch_wait_s_max=1e9,
            checkpoint_steps=10,
            live=LiveConfig(num_waiting_max=1_000),
        )
        self.policy = world.policy
        self.world = world
        self.dice = random.Random(0)
        self.trainer: asyncio.Task[None] | None = None
        self.rated: set[str] = set()
        self.waiting_max = 0
        self.joiner = FeedbackJoiner(JoinConfig(reward_wait_s=5.0))
        self.joiner.tick_s = 30.0

    def bus(self, name: str) -> MemoryBus:
        return MemoryBus(self.server, run_id="week", store=self.store, name=name)

    def start(self, actor) -> asyncio.Task[None]:
        host = ActorHost(
            actor,
            self.bus(actor.role),
            self.store,
            name=actor.role,
            seed=0,
            clock=self.clock,
            report_s=600.0,
        )
        return asyncio.create_task(host.run(asyncio.Event()))

    def start_trainer(self) -> None:
        publisher = Publisher(StoreIO(self.store, asyncio.sleep, _in_place))
        engine = LocalEngine(self.policy, self.config, publisher)
        self.learning = Trainer(self.config, self.policy, engine, seed=7, opener=open_vault())
        self.learning.tick_s = 30.0
        self.trainer = self.start(self.learning)

    async def kill_trainer_each_night(self) -> None:
        while True:
            await asyncio.sleep(DAY_S)
            await _end(self.trainer)
            await asyncio.sleep(60.0)
            self.start_trainer()

    async def user(self, number: int, bus: MemoryBus) -> None:
        """Come at some time of the week, ask, and say something later, or nothing."""
        day, hour = self.dice.randrange(7), min(23.9, abs(self.dice.gauss(14.0, 4.0)))
        await asyncio.sleep(day * DAY_S + hour * 3600.0)
        newest = await bus.last(StepCompleted)
        version = newest.event.policy_version if newest is not None else 0
        request_id, user = f"q{number}", f"u-{number % 60}"
        turn = make_turn(self.world.numpy, version, ())
        record = InferenceRecorded(
            request_id=request_id,
            session_id=request_id,
            key_id="k",
            tenant=f"t{number % 7}",
            user=user,
            training_consent=True,
            variant="current",
            propensity=1.0,
            turn=sealed_turn(turn, request_id),
            policy_version=version,
            replica="here",
            recorded_at=self.clock.now(),
        )
        await bus.publish([record])
        if self.dice.random() < SILENT:
            return
        delay_s = min(DELAY_S_MAX, math.exp(self.dice.gauss(math.log(1800.0), 2.0)) + 10.0)
        await asyncio.sleep(delay_s)
        signal = FeedbackReceived(
            feedback_id=f"f{number}",
            request_id=request_id,
            name="thumbs",
            value=float(self.dice.random() < 0.5),
            key_id="k",
            tenant=record.tenant,
            user=user,
        )
        await bus.publish([signal])
        self.rated.add(request_id)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(600.0)
            self.waiting_max = max(self.waiting_max, self.learning._batcher.num_live)

    async def run(self) -> None:
        for key, data in self.objects.items():
            await self.store.put(key, data)
        users = self.bus("users")
        joining = self.start(self.joiner)
        self.start_trainer()
        others = [
            asyncio.create_task(work()) for work in (self.kill_trainer_each_night, self.watch)
        ]
        await asyncio.gather(*(self.user(number, users) for number in range(NUM_REQUESTS)))
        await asyncio.sleep(2 * EPOCH.s_max)
        for task in (*others, joining, self.trainer):
            await _end(task)
        await self.check(users)

    async def check(self, bus: MemoryBus) -> None:
        manifests = [d async for d in bus.follow([BatchManifest], stop_at_end=True)]
        entries = [entry for d in manifests for entry in d.event.live]
        trained = {entry.rollout_id for entry in entries if entry.outcome.is_trained}
        assert len(self.rated) > 300
        share = len(trained & self.rated) / len(self.rated)
        assert share >= 0.95, share
        assert not trained - self.rated
        assert all(not d.event.groups for d in manifests)
        joined = bus.follow([LiveSampleJoined], stop_at_end=True)
        joined_at = {d.event.sample_id: d.stored_at async for d in joined}
        sizes = [sum(e.outcome.is_trained for e in d.event.live) for d in manifests]
        first = math.inf  # When the first came of those that a manifest takes or leaves waiting.
        for manifest, before in zip(manifests[::-1], [*manifests[-2::-1], None], strict=True):
            first = min([first, *(joined_at[entry.rollout_id] for entry in manifest.event.live)])
            since = max(first, before.stored_at) if before else first
            assert manifest.stored_at - since < EPOCH.s_max + SLACK_S
        assert len(manifests) > 25 and max(sizes) <= 32
        assert min(sizes) < EPOCH.num_samples <= max(sizes), "cut by time, and by samples"
        assert self.waiting_max < 3 * EPOCH.num_samples
        replayed = await replay(
            ReplayLog(
                deliveries=bus.follow(REPLAY_TYPES, stop_at_end=True),
                last=last_of(bus),
                store=self.store,
                opener=open_vault(),
            ),
            self.policy,
            self.config,
        )
        assert replayed.first_difference == ""
        assert replayed.steps_compared == len(manifests)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_week(make_world, monkeypatch):
    monkeypatch.setattr(asyncio, "to_thread", _in_place)
    run_virtual(Week(make_world(0)).run())


async def _in_place(function, *arguments, **options):
    return function(*arguments, **options)
