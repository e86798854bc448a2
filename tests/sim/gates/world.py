"""Gatekeepers on the in-memory bus, with users who behave by arm and an evaluator that answers."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine

import msgspec
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import Faults, MemoryServer
from tests.support.virtual_clock import VirtualClock, run_virtual

from penstock.actors.gatekeeper.actor import Gatekeeper
from penstock.actors.gatekeeper.config import (
    GatekeeperConfig,
    GuardConfig,
    LiveTestConfig,
    OfflineConfig,
)
from penstock.actors.runtime.host import ActorHost
from penstock.envs.tasks.storage import tasks_key
from penstock.gateway.arms import Arms
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.base import Event
from penstock.messages.feedback import InferenceRecorded, LiveSampleJoined
from penstock.messages.gates import Arm, ExperimentDecided, ExperimentStarted, ReplyFacts
from penstock.messages.generation import ChannelMoved, ReplicaReported
from penstock.messages.reward import EvalAnnounced, EvalCompleted, Outcome, Verdict
from penstock.messages.rollout import StoredTurn, TurnSummary, VersionSpan
from penstock.messages.task import Limits, Purpose, Split, Task
from penstock.messages.training import BatchManifest, SampleEntry, StepCompleted, VersionDrift
from penstock.messages.weights import SnapshotKind, WeightsPublished

NUM_TASKS = 20
TURN = StoredTurn(
    object_key="claims/0-turn",
    num_bytes=1,
    blake3="0" * 64,
    summary=TurnSummary(
        num_context=9, num_sampled=9, version_spans=[VersionSpan(policy_version=0, num_tokens=9)]
    ),
)
CONFIG = GatekeeperConfig(
    quality_bar=0.4,
    offline=OfflineConfig(num_tasks=NUM_TASKS),
    test=LiveTestConfig(sessions_per_user=1, replies_per_user=1, user_window_s=4.0),
    guards={
        name: GuardConfig(bound=bound, num_min=num)
        for name, bound, num in [
            ("reply_length", 1.0, 40),
            ("empty_replies", 0.02, 40),
            ("invalid_calls", 0.1, 40),
            ("question_rate", 0.1, 40),
            ("edit_rate", 0.1, 40),
            ("unrated", 0.1, 40),
            ("tool_mix", 0.2, 20),
            ("discard_rate", 0.1, 20),
            ("kl", 0.05, 50),
            ("ess", 0.5, 50),
        ]
    },
)
"""As a run's, with fewer users."""

Behavior = Callable[[Arm, random.Random], tuple[ReplyFacts, float | None]]
"""From an arm to what a reply is like and what the user makes of it; None: no feedback."""


def published(version: int) -> WeightsPublished:
    return WeightsPublished(
        policy_version=version, base_version=-1, kind=SnapshotKind.FULL, optimizer_step=version,
        fencing_token=0, representation="bf16", base_root_digest="", target_root_digest="d",
        num_params=1, num_changed=0, full_bytes=2, shards=[],
    )  # fmt: skip


def stepped(step: int, drift: dict[int, VersionDrift]) -> StepCompleted:
    return StepCompleted(
        step=step, policy_version=step, weights_digest="d", optimizer_digest="d", metrics={},
        drift=drift,
    )  # fmt: skip


def good(arm: Arm, rng: random.Random) -> tuple[ReplyFacts, float | None]:
    """An agent that edits, liked more often by the candidate's users."""
    liked = 0.9 if arm is Arm.CANDIDATE else 0.4
    calls = {"edit_file": 1} if rng.random() < 0.7 else {"read_file": 1}
    facts = ReplyFacts(num_tokens=rng.randint(40, 80), num_calls=1, tools=calls)
    return facts, float(rng.random() < liked)


class World:
    """The bus, a store, an evaluator's answers, and the users."""

    def __init__(self, solved: dict[int, int] | None = None, config: GatekeeperConfig = CONFIG):
        self.config = config
        self.solved = solved or {}
        """Version -> how many tasks it solves; all of them if it is not named."""
        self.server = MemoryServer(seed=0, clock=VirtualClock())
        self.store = MemoryStore()
        self.arms = Arms("stable")
        self.served = {"stable": 0, "candidate": 0}
        self.channels = dict(self.served)
        self._rng = random.Random(7)
        self.bus = MemoryBus(self.server, run_id="test", store=self.store, name="test")
        self._tasks: list[asyncio.Task] = []
        self._num_users = 0
        self._num_hosts = 0
        self._num_steps = 0
        self.num_decided = 0

    async def start(self) -> None:
        tasks = [
            Task(task_id=f"t{i}", category="c", split=Split.HELDOUT, instruction="", files={},
                 limits=Limits())
            for i in range(NUM_TASKS)
        ]  # fmt: skip
        await self.store.put(tasks_key(Split.HELDOUT), msgspec.msgpack.encode(tasks))
        for work in (self._evaluate(), self._serve(), self._gateway()):
            self._tasks.append(asyncio.create_task(work))
        await self.publish(published(0))
        await self.publish(*self._evaluation("v0", 0))

    def gatekeeper(self) -> asyncio.Task:
        """Start one; cancelling its task is kill -9."""
        self._num_hosts += 1
        name = f"gatekeeper-{self._num_hosts}"
        bus = MemoryBus(self.server, run_id="test", store=self.store, name=name)
        host = ActorHost(
            Gatekeeper(self.config, "hidden_tests"), bus, self.store, name=name,
            seed=self._num_hosts, clock=VirtualClock(), incarnation=name,
        )  # fmt: skip
        self._tasks.append(asyncio.create_task(host.run(asyncio.Event())))
        return self._tasks[-1]

    async def publish(self, *events: Event) -> None:
        await self.bus.publish(events)

    async def read(self, event_type: type[Event]) -> list:
        return [d.event async for d in self.bus.follow([event_type], stop_at_end=True)]

    async def wait_for(self, event_type: type[Event], count: int = 1, within_s: float = 3600.0):
        async with asyncio.timeout(within_s):
            while len(events := await self.read(event_type)) < count:
                await asyncio.sleep(1.0)
        return events[count - 1]

    async def users(self, behavior: Behavior, number: int, num: int = 100, times: int = 20) -> None:
        """Send new users, a session each, `num` at a time, until the candidate is decided."""
        for _ in range(times):
            if self.num_decided > number:
                return
            for _ in range(num):
                await self._session(behavior)
            await self.train([])
            await asyncio.sleep(5.0)

    async def train(self, samples: list[SampleEntry]) -> None:
        """Take a step, in which stable's tokens are near enough."""
        self._num_steps += 1
        step = self._num_steps
        manifest = BatchManifest(step=step, policy_version=step - 1, groups=[], live=samples)
        drift = {version: VersionDrift(num_tokens=60, kl=0.01, ess=0.9) for version in range(4)}
        await self.publish(manifest, stepped(step, drift))

    async def _session(self, behavior: Behavior) -> None:
        self._num_users += 1
        user, now = f"u-{self._num_users}", VirtualClock().now()
        route = self.arms.route(user, now)
        arm = Arm(route.channel)
        facts, reward = behavior(arm, self._rng)
        version = self.served[route.channel]
        about = {"tenant": "t", "user": user, "variant": route.variant, "session_id": f"s{user}"}
        await self.publish(InferenceRecorded(
            request_id=f"r{user}", key_id="k", training_consent=True, facts=facts, turn=TURN,
            propensity=route.propensity, channel=route.channel, recorded_at=now,
            policy_version=version, replica="w", **about,
        ))  # fmt: skip
        if reward is None:
            return
        await self.publish(LiveSampleJoined(
            sample_id=f"r{user}", request_ids=[f"r{user}"], turns=[TURN.summary], reward=reward,
            feedback_ids=[], propensity=route.propensity, policy_version=version, **about,
        ))  # fmt: skip
        entry = SampleEntry(
            rollout_id=f"r{user}", outcome=Outcome.SOLVED, reward=reward, advantage=0.0,
            version_spans=[],
        )  # fmt: skip
        await self.train([entry])

    def _evaluation(self, eval_id: str, version: int) -> list[Event]:
        num_solved = self.solved.get(version, NUM_TASKS)
        verdicts: list[Event] = [
            Verdict(
                rollout_id=f"e{eval_id}-{i}", group_id=eval_id, group_index=version,
                purpose=Purpose.EVAL, judge="hidden_tests", judge_version="1",
                outcome=Outcome.SOLVED if i < num_solved else Outcome.FAILED, reward=0.0,
                policy_version=version, policy_version_max=version,
            )
            for i in range(NUM_TASKS)
        ]  # fmt: skip
        completed = EvalCompleted(
            eval_id=eval_id, policy_version=version, num_solved=num_solved, num_tasks=NUM_TASKS
        )
        return [*verdicts, completed]

    async def _evaluate(self) -> None:
        """Answer announcements, as evaluator, workers and judge would."""
        async for delivery in self.bus.follow([EvalAnnounced]):
            event = delivery.event
            assert isinstance(event, EvalAnnounced)
            await asyncio.sleep(20.0)
            await self.publish(*self._evaluation(event.eval_id, event.policy_version))

    async def _serve(self) -> None:
        """Two replicas that follow the channels, some seconds late."""
        while True:
            await asyncio.sleep(3.0)
            self.served = dict(self.channels)
            for channel, version in self.served.items():
                await self.publish(ReplicaReported(
                    region=channel, replica=channel, started_at=0.0, serves=[Purpose.LIVE],
                    channel=channel, policy_version=version,
                ))  # fmt: skip

    async def _gateway(self) -> None:
        kinds = [ExperimentStarted, ExperimentDecided, ChannelMoved]
        async for delivery in self.bus.follow(kinds):
            match delivery.event:
                case ExperimentStarted() as event:
                    self.arms.started(event)
                case ExperimentDecided() as event:
                    self.arms.decided(event)
                    self.num_decided = max(self.num_decided, event.number + 1)
                case ChannelMoved() as event:
                    self.channels |= event.channels

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def simulate(scenario: Callable[[World], Coroutine], **settings) -> None:
    """Run a scenario in a world of its own, on virtual time."""

    async def run() -> None:
        world = World(**settings)
        await world.start()
        try:
            await scenario(world)
        finally:
            await world.close()

    run_virtual(run())


def lossy() -> Faults:
    return Faults(lose_receipt=0.2, latency_s_max=0.005)
