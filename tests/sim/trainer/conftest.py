"""A small world around one trainer: a log with compare-and-swap, a pacer, workers and a judge."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import pytest
import torch
from tests.sealed import open_vault
from tests.sim.trainer.sessions import session_events

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.publisher import Publisher
from penstock.actors.runtime.clock import SystemClock
from penstock.actors.runtime.host_context import Waits
from penstock.actors.trainer.actor import Trainer
from penstock.actors.trainer.config import MidtrainConfig, OptimizerConfig, TrainerConfig
from penstock.actors.trainer.engines.local import LocalEngine
from penstock.actors.trainer.midtraining.corpus import Corpus, encode_corpus
from penstock.kernels.arrays import to_array
from penstock.kernels.route_segments import seal_routes
from penstock.messages.base import Event
from penstock.messages.bus import Delivery, PublishReceipt
from penstock.messages.control import RunFinished
from penstock.messages.errors import CorruptDataError, NotFoundError
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import (
    EpisodeEnd,
    EpisodeFiles,
    RolloutFinished,
    StopReason,
    Turn,
    TurnSampled,
    VersionSpan,
)
from penstock.messages.streams import event_subject
from penstock.messages.task import CreditsChanged, Purpose, Sampling
from penstock.messages.training import BatchManifest, StepCompleted

POLICY = PolicyConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=4,
    moe_intermediate_size=8,
    max_position_embeddings=2048,
)
GROUP_SIZE = 3


class Killed(BaseException):
    """As kill -9: whatever is in memory is gone."""


class MemoryStore:
    """An object store."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    async def put(self, key: str, data: bytes | memoryview) -> None:
        if self.objects.setdefault(key, bytes(data)) != bytes(data):
            raise CorruptDataError(key)

    async def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise NotFoundError(key)
        return self.objects[key]

    async def exists(self, key: str) -> bool:
        return key in self.objects

    async def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    async def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self.objects if key.startswith(prefix))


class Log:
    """All streams in one list; a second event of a key is refused; it can die in a publish."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.subjects: set[str] = set()
        self.num_until_kill: float = float("inf")

    async def publish(self, *events: Event) -> list[PublishReceipt]:
        receipts = []
        for event in events:
            subject = event_subject("run", event)
            is_duplicate = subject in self.subjects and not isinstance(event, CreditsChanged)
            receipts.append(
                PublishReceipt(
                    stream=event.stream, sequence=len(self.deliveries), is_duplicate=is_duplicate
                )
            )
            if is_duplicate:
                continue
            self.subjects.add(subject)
            self.deliveries.append(
                Delivery(
                    event=event,
                    subject=subject,
                    stream=event.stream,
                    sequence=len(self.deliveries) + 1,
                    stored_at=float(len(self.deliveries)),
                )
            )
            if isinstance(event, BatchManifest | StepCompleted | RunFinished):
                self.num_until_kill -= 1
                if self.num_until_kill < 0:
                    self.num_until_kill = float("inf")
                    raise Killed
        return receipts

    def of(self, event_type: type[Event]) -> list[Event]:
        return [d.event for d in self.deliveries if isinstance(d.event, event_type)]

    async def last(self, event_type: type[Event], key: str) -> Event | None:
        found = [event for event in self.of(event_type) if event.key() == key]
        return found[-1] if found else None

    async def follow(self) -> AsyncIterator[Delivery]:
        for delivery in self.deliveries:
            yield delivery


class FakeContext:
    """A `Context` over the log; work runs in place."""

    def __init__(self, log: Log, store: MemoryStore) -> None:
        self.run_id, self.actor, self.store = "run", "trainer", store
        self.random = random.Random(0)
        self.publish, self.last = log.publish, log.last
        self._clock = SystemClock()
        self.monotonic, self.now = self._clock.monotonic, self._clock.now
        self.waits = Waits("trainer", self._clock)
        self.gauges: dict[str, float] = {}
        self.stored_at = 0.0
        self.tasks: list[asyncio.Task] = []

    async def offload(self, function: Callable, *args, **kwargs):
        return function(*args, **kwargs)

    def waiting(self, target, reason, *, deadline_s, policy_version=-1):
        return self.waits.with_deadline(target, reason, deadline_s, policy_version)

    def spawn(self, name, coroutine) -> None:
        self.tasks.append(asyncio.ensure_future(coroutine))

    def set_gauge(self, name: str, value: float) -> None:
        self.gauges[name] = value

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


class World:
    """Grants groups as the pacer does, and finishes their rollouts in any order."""

    def __init__(self, seed: int = 0, config: TrainerConfig | None = None) -> None:
        self.random = random.Random(seed)
        self.numpy = np.random.default_rng(seed)
        self.config = config or small_config()
        self.policy = POLICY
        self.log, self.store = Log(), MemoryStore()
        self.pending: list[list[Event]] = []
        self.num_granted = 0
        for key in ("midtrain/tokens", "midtrain/heldout"):
            tokens = self.numpy.integers(0, 8, 600).astype(np.int32)
            self.store.objects[key] = encode_corpus(Corpus(tokens=tokens))

    def trainer(self) -> Trainer:
        engine = LocalEngine(self.policy, self.config, Publisher(StoreIO(self.store)))
        return Trainer(self.config, self.policy, engine, seed=7, opener=open_vault())

    async def run(self) -> int:
        """Run until the run is finished; return how often the trainer was killed."""
        num_kills = 0
        while True:
            try:
                await self.run_once()
            except Killed:
                num_kills += 1
                continue
            return num_kills

    async def run_once(self) -> Trainer:
        """Run one incarnation of the trainer from its start to the end of the run."""
        ctx, trainer = FakeContext(self.log, self.store), self.trainer()
        try:
            await self.log.publish(*await trainer.start(ctx))
            position: dict[str, int] = {}
            for _ in range(100_000):
                if self.log.of(RunFinished):
                    await self.log.publish(*await trainer.stop(ctx))
                    return trainer
                delivery = self._next(position)
                if delivery is None:
                    await self._work()
                elif type(delivery.event) in trainer.follows:
                    handler = getattr(trainer, _handler_name(delivery.event))
                    await self.log.publish(*await handler(delivery.event, ctx))
            raise AssertionError("the run does not end")
        finally:
            await ctx.close()

    def _next(self, position: dict[str, int]) -> Delivery | None:
        """Return the next delivery of a stream drawn at random: streams are not in step."""
        heads: dict[str, Delivery] = {}
        for delivery in self.log.deliveries:
            if delivery.sequence > position.get(delivery.stream, 0):
                heads.setdefault(delivery.stream, delivery)
        if not heads:
            return None
        delivery = self.random.choice(list(heads.values()))
        position[delivery.stream] = delivery.sequence
        return delivery

    async def _work(self) -> None:
        """Grant what may be granted, or let something of a running rollout happen."""
        manifests = self.log.of(BatchManifest)
        num_discarded = sum(manifest.num_made_up_for for manifest in manifests)
        num_trained = sum(manifest.num_placed for manifest in manifests)
        version = len(self.log.of(StepCompleted))
        ahead = self.config.staleness_max + version + 1
        allowed = ahead * self.config.groups_per_batch + num_discarded
        if self.num_granted < allowed:
            while self.num_granted < allowed:
                self._grant(version)
            await self.log.publish(
                CreditsChanged(
                    policy_version=version,
                    num_groups_granted=self.num_granted,
                    num_groups_trained=num_trained,
                    num_groups_discarded=num_discarded,
                    num_groups_allowed=allowed,
                    staleness_max=self.config.staleness_max,
                )
            )
            return
        assert self.pending, "nothing runs, nothing may be granted, and the trainer waits"
        events = self.random.choice(self.pending)
        await self.log.publish(events.pop(0))
        if not events:
            self.pending.remove(events)

    def _grant(self, version: int) -> None:
        for member in range(GROUP_SIZE):
            self.pending.append(self._rollout(self.num_granted, member, version))
        if self.num_granted % 3 == 0:
            self.pending.append(self._live(self.num_granted, version))
        self.num_granted += 1

    def _rollout(self, index: int, member: int, version: int) -> list[Event]:
        name, group = f"r{index}-{member}", f"g{index}"
        turns: list[Turn] = []
        for _ in range(self.random.randint(1, 3)):
            turns.append(self.turn(version, turns))
        outcome = self.random.choice(
            [Outcome.SOLVED, Outcome.FAILED, Outcome.FAILED, Outcome.INFRASTRUCTURE_ERROR]
        )
        reward = 1.0 if outcome is Outcome.SOLVED else 0.0
        sampled = [
            TurnSampled(
                rollout_id=name, group_id=group, purpose=Purpose.TRAIN, turn_index=i, turn=turn
            )
            for i, turn in enumerate(turns)
        ]
        finished = RolloutFinished(
            rollout_id=name,
            group_id=group,
            group_index=index,
            group_size=GROUP_SIZE,
            member=member,
            purpose=Purpose.TRAIN,
            task_id=f"t{index}",
            category="operator",
            end=EpisodeEnd.FINISHED,
            turns=[turn.summary for turn in turns],
            files=EpisodeFiles(),
        )
        verdict = Verdict(
            rollout_id=name,
            group_id=group,
            group_index=index,
            purpose=Purpose.TRAIN,
            judge="tests",
            judge_version="1",
            outcome=outcome,
            reward=reward,
            components={"tests": reward},
        )
        return [*sampled, finished, verdict]

    def _live(self, index: int, version: int) -> list[Event]:
        turns = [self.turn(version) for _ in range(1 + index % 2)]
        return session_events(index, turns, self.random.choice([1.0, 0.0]))

    def turn(self, version: int, before: Sequence[Turn] = ()) -> Turn:
        """Draw a turn; its routes start at the last token of the turn before, if there is one."""
        return make_turn(self.numpy, version, before)


def make_turn(rng: np.random.Generator, version: int, before: Sequence[Turn]) -> Turn:
    num_context, num_sampled = int(rng.integers(2, 6)), int(rng.integers(2, 9))
    num_routes = num_context + num_sampled - (not before)
    past = sum(turn.context_ids.shape[0] + turn.token_ids.shape[0] for turn in before)
    routes = rng.integers(0, 4, (num_routes, POLICY.num_hidden_layers, 1), dtype=np.uint8)
    routes = np.concatenate([routes, (routes + 1) % 4], axis=2).astype(np.int16)
    segment = seal_routes(
        torch.from_numpy(routes),
        num_experts=POLICY.num_experts,
        policy_version=version,
        first_position=max(0, past - 1),
    )
    return Turn(
        context_ids=to_array(rng.integers(0, 64, num_context).astype(np.int32)),
        token_ids=to_array(rng.integers(0, 64, num_sampled).astype(np.int32)),
        behavior_logprobs=to_array(rng.uniform(-5, -3, num_sampled).astype(np.float32)),
        version_spans=[VersionSpan(policy_version=version, num_tokens=num_sampled)],
        stop_reason=StopReason.STOP,
        route_segments=[segment],
        sampling=Sampling(),
    )


def small_config(**changes) -> TrainerConfig:
    values = {
        "midtrain": MidtrainConfig(
            num_tokens=512, sequence_tokens=32, batch_tokens=128, report_steps=2
        ),
        "optimizer": OptimizerConfig(learning_rate=1e-3, warmup_steps=2),
        "groups_per_batch": 2,
        "staleness_max": 1,
        "steps_max": 6,
        "checkpoint_steps": 3,
        "checkpoints_kept": 1,
        "infrastructure_share_max": 1.0,  # A quarter of these rollouts fail so.
    }
    return TrainerConfig(**(values | changes))


def _handler_name(event: Event) -> str:
    return "on_" + "".join(
        f"_{c.lower()}" if c.isupper() else c for c in type(event).__name__
    ).removeprefix("_")


@pytest.fixture
def make_world() -> Callable[..., World]:
    """Return `World`; its settings are the keyword arguments of `TrainerConfig`."""

    def make(seed: int = 0, **changes) -> World:
        return World(seed, small_config(**changes))

    return make
