"""The events of a live service, as its own join and batcher make them, on a clock of their own."""

import heapq
import itertools
import random
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from tests.sealed import sealed_turn

from penstock.actors.feedback.actor import FeedbackJoiner
from penstock.actors.feedback.config import JoinConfig
from penstock.actors.trainer.batching.batcher import Batcher
from penstock.actors.trainer.config import EpochConfig, LiveConfig, TrainerConfig
from penstock.messages.base import Array, Event
from penstock.messages.feedback import (
    FeedbackReceived,
    FeedbackRetracted,
    InferenceCounted,
    InferenceRecorded,
    LiveSampleJoined,
)
from penstock.messages.gates import (
    CandidateChosen,
    Decision,
    ExperimentDecided,
    ExperimentStarted,
    ReplyFacts,
)
from penstock.messages.generation import ChannelMoved
from penstock.messages.rollout import StopReason, Turn, VersionSpan
from penstock.messages.signals.preferences import Label, PreferencePair
from penstock.messages.task import GroupGranted
from penstock.messages.training import BatchManifest, StepCompleted

R = TypeVar("R")
NUM_USERS, NUM_TENANTS = 1000, 20
FEEDBACK = ("thumbs", "accept", "undo", "keep_rate_1h", "tests_passed")
TRAINER = TrainerConfig(
    epoch=EpochConfig(num_samples=256, s_max=3600.0), live=LiveConfig(num_samples_max=256)
)
STEPS_PER_CANDIDATE = 8
_EMPTY = Array(dtype="int32", shape=(0,), data=b"")


def finished(work: Coroutine[Any, Any, R]) -> R:
    """Return the result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("expected a handler that waits for nothing")


class JoinContext:
    """What the join asks of its context, at a given time."""

    is_caught_up = True

    def __init__(self) -> None:
        self.stored_at = 0.0
        self.gauges: dict[str, float] = {}

    def now(self) -> float:
        """Return the time of the newest event."""
        return self.stored_at

    def set_gauge(self, name: str, value: float) -> None:
        """Note a metric."""
        self.gauges[name] = value


class AgedLog:
    """Yields events with their times, in the order of the log; iterate once.

    Args:
        num_requests: Users' requests.
        seed: Of everything that is drawn.
        per_minute: Requests a minute.
        join: Settings of the feedback join.
        start_at: When the first request comes, unix seconds.

    """

    def __init__(
        self,
        num_requests: int,
        *,
        seed: int = 0,
        per_minute: float = 50.0,
        join: JoinConfig | None = None,
        start_at: float = 1_700_000_000.0,
    ) -> None:
        self._random = random.Random(seed)
        self._num_requests, self._pause_s = num_requests, 60.0 / per_minute
        self._start_at = start_at
        self._ctx = JoinContext()
        self.join = FeedbackJoiner(join or JoinConfig())
        self.batcher = Batcher(TRAINER)
        self.step = 0
        self._later: list[tuple[float, int, Event]] = []
        self._count = itertools.count()
        self._sessions: dict[int, str] = {}
        self._number = -1
        self._turn = self._sealed()

    def __iter__(self) -> Iterator[tuple[Event, float]]:
        """Yield each event, and when it is stored, unix seconds."""
        at = self._start_at
        ticked_at = at
        for number in range(self._num_requests):
            at += self._random.expovariate(1.0 / self._pause_s)
            due = [(at, self._request(number, at))]
            while self._later and self._later[0][0] <= at:
                due.append((self._later[0][0], heapq.heappop(self._later)[2]))
            for when, event in sorted(due, key=lambda each: each[0]):
                yield from self._stored(event, when)
            if at >= ticked_at + 5.0:
                ticked_at = at
                self._ctx.stored_at = at
                effects = finished(self.join.on_tick(self._any_ctx))
                for event in effects:
                    yield from self._stored(event, at)
                yield from self._train(at)

    @property
    def _any_ctx(self) -> Any:
        return self._ctx

    def _stored(self, event: Event, at: float) -> Iterator[tuple[Event, float]]:
        """Yield an event that is stored, and what the join makes of it."""
        self._ctx.stored_at = at
        yield event, at
        if isinstance(event, LiveSampleJoined):
            self.batcher.add_live(event)
        if isinstance(event, PreferencePair | Label):
            self.batcher.preferences.add(event)
        if type(event) in self.join.follows:
            name = "on_" + "".join(f"_{c.lower()}" if c.isupper() else c for c in _name(event))[1:]
            handler = getattr(self.join, name)
            for effect in finished(handler(event, self._any_ctx)):
                yield from self._stored(effect, at)

    def _request(self, number: int, at: float) -> Event:
        draw, user = self._random, self._random.randrange(NUM_USERS)
        if user not in self._sessions or draw.random() < 0.4:
            self._sessions[user] = f"s{number}"
        arm = "candidate" if user % 2 else "stable"
        common: dict[str, Any] = {
            "request_id": f"r{number}",
            "key_id": f"k{user % NUM_TENANTS}",
            "tenant": f"t{user % NUM_TENANTS}",
            "variant": f"e{self._number}.0.{arm}" if self._number >= 0 else "current",
            "propensity": 0.5 if self._number >= 0 else 1.0,
            "facts": ReplyFacts(num_tokens=draw.randrange(200)),
            "recorded_at": at,
            "policy_version": self.step,
            "replica": "west",
        }
        self._later_feedback(number, user, at)
        if draw.random() < 0.05:
            summary, stop = self._turn.summary, StopReason.STOP
            return InferenceCounted(**common, turn=summary, stop_reason=stop)
        return InferenceRecorded(
            **common,
            session_id=self._sessions[user],
            user=f"u{user}",
            training_consent=draw.random() < 0.9,
            turn=self._turn,
        )

    def _later_feedback(self, number: int, user: int, at: float) -> None:
        draw = self._random
        for index in range(draw.choice((0, 0, 1, 1, 2))):
            # Some of another tenant, some of a request that never comes, some before the request.
            tenant = f"t{(user + (draw.random() < 0.02)) % NUM_TENANTS}"
            request = f"r{number}" if draw.random() < 0.99 else f"lost{number}"
            event = FeedbackReceived(
                feedback_id=f"f{number}-{index}",
                request_id=request,
                name=draw.choice(FEEDBACK),
                value=float(draw.random() < 0.6),
                key_id=f"k{user % NUM_TENANTS}",
                tenant=tenant,
                user=f"u{user}",
                is_trusted=draw.random() < 0.1,
            )
            delay_s = min(draw.lognormvariate(4.0, 2.0) - 1.0, 2 * 86_400.0)
            self._push(at + delay_s, event)
            if draw.random() < 0.03:
                taken = FeedbackRetracted(
                    feedback_id=event.feedback_id, request_id=request, tenant=tenant
                )
                self._push(at + delay_s + 60.0, taken)

    def _push(self, at: float, event: Event) -> None:
        heapq.heappush(self._later, (at, next(self._count), event))

    def _train(self, at: float) -> Iterator[tuple[Event, float]]:
        if self.batcher.num_live < TRAINER.live.num_samples_max:
            return
        manifest = self.batcher.propose(self.step + 1)
        if manifest is None:
            return
        self.batcher.commit(manifest)
        self.step = manifest.step
        yield manifest, at
        yield _step(manifest), at
        yield GroupGranted(group_index=self.step - 1, task_id=f"task{self.step % 50}"), at
        if self.step % STEPS_PER_CANDIDATE == 0:
            yield from ((event, at) for event in self._experiment(at))

    def _experiment(self, at: float) -> Sequence[Event]:
        """Return the end of one experiment and the start of the next."""
        number, version = self._number + 1, self.step
        ended: list[Event] = []
        if self._number >= 0:
            ended = [
                ExperimentDecided(
                    number=self._number,
                    decision=Decision.EXPIRED,
                    policy_version=version - STEPS_PER_CANDIDATE,
                    stable_version=0,
                    reason="",
                    at=at,
                )
            ]
        self._number = number
        return [
            *ended,
            CandidateChosen(number=number, policy_version=version, stable_version=0, at=at),
            ChannelMoved(
                number=number,
                channel="candidate",
                policy_version=version,
                channels={"stable": 0, "candidate": version},
                candidate_number=number,
            ),
            ExperimentStarted(
                number=number,
                policy_version=version,
                stable_version=0,
                share=0.5,
                salt="s",
                sticky_s=86_400.0,
                at=at,
            ),
        ]

    def _sealed(self) -> Any:
        turn = Turn(
            context_ids=Array(dtype="int32", shape=(200,), data=bytes(800)),
            token_ids=Array(dtype="int32", shape=(50,), data=bytes(200)),
            behavior_logprobs=_EMPTY,
            version_spans=[VersionSpan(policy_version=0, num_tokens=50)],
            stop_reason=StopReason.STOP,
        )
        return sealed_turn(turn, "r0")


def _name(event: Event) -> str:
    return type(event).__name__


def _step(manifest: BatchManifest) -> StepCompleted:
    return StepCompleted(
        step=manifest.step,
        policy_version=manifest.step,
        weights_digest=f"w{manifest.step}",
        optimizer_digest="o",
        metrics={"loss": 0.1, "reward_mean": 0.5},
        train_s=1.0,
        wait_s=1.0,
    )
