"""The context that the host gives to its actor, and the actor's edges in the wait-for graph."""

import asyncio
import contextlib
import contextvars
import functools
import itertools
import logging
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any, ParamSpec, TypeVar

import msgspec

from penstock.actors.runtime.background_tasks import Tasks
from penstock.actors.runtime.clock import Clock
from penstock.actors.runtime.meter import Meter
from penstock.messages.base import Event, Message
from penstock.messages.bus import Bus, Delivery, ObjectStore, PublishReceipt
from penstock.messages.errors import BusError, DeadlineError
from penstock.messages.telemetry import Wait

log = logging.getLogger(__name__)

WAITS_REPORTED_MAX = 32
"""Maximum waits in one report; the oldest are kept."""


class Waits:
    """The waits in progress of one actor."""

    def __init__(self, actor: str, clock: Clock) -> None:
        self._actor = actor
        self._clock = clock
        self._tokens = itertools.count()
        self._open: dict[int, Wait] = {}

    def current(self) -> list[Wait]:
        """Return the oldest waits in progress."""
        return sorted(self._open.values(), key=lambda wait: wait.since)[:WAITS_REPORTED_MAX]

    @contextlib.contextmanager
    def shown(
        self, target: str, reason: str, deadline_s: float, policy_version: int = -1
    ) -> Generator[None, None, None]:
        """List a wait in reports during the block; its deadline is enforced elsewhere."""
        token = next(self._tokens)
        self._open[token] = Wait(
            target=target,
            reason=reason,
            since=self._clock.now(),
            deadline_s=deadline_s,
            policy_version=policy_version,
        )
        try:
            yield
        finally:
            del self._open[token]

    @contextlib.asynccontextmanager
    async def with_deadline(
        self, target: str, reason: str, deadline_s: float, policy_version: int = -1
    ) -> AsyncGenerator[None, None]:
        """List a wait in reports during the block, and end the block at its deadline.

        Raises:
            DeadlineError: The block did not end in time.

        """
        bound = asyncio.timeout(deadline_s)
        with self.shown(target, reason, deadline_s, policy_version):
            try:
                async with bound:
                    yield
            except TimeoutError as error:
                # The body may raise a timeout of its own, which names its cause better.
                if not bound.expired() or isinstance(error, DeadlineError):
                    raise
                raise DeadlineError(
                    f"{self._actor} waited {deadline_s:g} s for {target}: {reason}"
                ) from error


OFFLOAD_S_MAX = 1800.0
"""Longest time for one piece of blocking work in seconds. The thread cannot be stopped, but the
actor fails, so the problem is visible."""

CHANGES_MAX = 32
"""Maximum attempts at one change while other processes change the same key."""
CHANGE_PAUSE_S = 0.005
"""Longest pause after a failed change in seconds, multiplied by the attempts before it."""
NUM_CHANGED_MAX = 1024
"""Maximum number of keys whose last change is remembered."""

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=Event)


class ActorIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Name, seed and incarnation of an actor."""

    name: str
    seed: int
    """Seed of the run."""
    incarnation: str
    """Text that distinguishes several starts under one name."""


class HostContext:
    """A `Context` over a bus, a store and a clock."""

    def __init__(
        self, identity: ActorIdentity, *, bus: Bus, store: ObjectStore, clock: Clock
    ) -> None:
        self._bus = bus
        self._store = store
        self._name = identity.name
        self._incarnation = identity.incarnation
        self._clock = clock
        self._random = random.Random(f"{identity.seed}/{identity.name}")
        self._num_ids = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{identity.name}-work")
        self.meter = Meter(clock)
        self.waits = Waits(identity.name, clock)
        self.tasks = Tasks()
        self.gauges: dict[str, float] = {}
        self.stored_at = 0.0
        self.is_caught_up = False
        self._changed: dict[tuple[str, str], Delivery] = {}

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self._bus.run_id

    @property
    def actor(self) -> str:
        """Name of the actor."""
        return self._name

    @property
    def random(self) -> random.Random:
        """Random generator, seeded by the run seed and the actor name."""
        return self._random

    @property
    def store(self) -> ObjectStore:
        """Object store of the run."""
        return self._store

    def now(self) -> float:
        """Return the Unix time in seconds."""
        return self._clock.now()

    def monotonic(self) -> float:
        """Return a time in seconds that never goes backwards."""
        return self._clock.monotonic()

    def new_id(self, prefix: str) -> str:
        """Return an id that is unique in the run."""
        # The incarnation, since the counter of a restarted actor begins at 1 again.
        self._num_ids += 1
        return f"{prefix}-{self._name}-{self._incarnation}-{self._num_ids}"

    async def sleep(self, duration_s: float) -> None:
        """Sleep on the actor's clock."""
        await asyncio.sleep(duration_s)

    async def publish(self, *events: Event) -> list[PublishReceipt]:
        """Publish durably."""
        return await self._bus.publish(events) if events else []

    async def last(self, event_type: type[E], key: str | None = None) -> E | None:
        """Return the newest stored event of a type, and of `key` if given, or None."""
        delivery = await self._bus.last(event_type, key)
        if delivery is None:
            return None
        assert isinstance(delivery.event, event_type)
        return delivery.event

    async def change(self, event_type: type[E], key: str, make: Callable[[E | None], E]) -> E:
        """Replace the newest event of a key, atomically."""
        name = (event_type.__name__, key)
        for attempt in range(CHANGES_MAX):
            # Popped: if the remembered event is outdated, the next attempt asks the bus.
            known = self._changed.pop(name, None)
            if known is None:
                known = await self._bus.last(event_type, key)
            before = None if known is None else known.event
            assert before is None or isinstance(before, event_type)
            event = make(before)
            receipt = await self._bus.swap(event, 0 if known is None else known.sequence)
            if not receipt.is_duplicate:
                self._note_changed(name, event, receipt)
                return event
            log.debug("change of %s %s lost a race, attempt %d", *name, attempt + 1)
            # Random, so that processes that collided once do not collide again in lockstep.
            await asyncio.sleep(self._random.random() * CHANGE_PAUSE_S * attempt)
        raise BusError(
            f"{event_type.__name__} {key}: gave up after {CHANGES_MAX} attempts, other processes"
            " changed it each time"
        )

    def _note_changed(self, name: tuple[str, str], event: Event, receipt: PublishReceipt) -> None:
        """Remember the stored event, so that the next change need not read it from the bus."""
        self._changed[name] = Delivery(
            event=event,
            subject="",
            stream=event.stream,
            sequence=receipt.sequence,
            stored_at=self._clock.now(),
        )
        if len(self._changed) > NUM_CHANGED_MAX:
            del self._changed[next(iter(self._changed))]

    async def request(
        self, service: str, message: Message, *, deadline_s: float, reason: str = ""
    ) -> Message:
        """Send a request and wait for the reply; the wait is listed in reports."""
        reason = reason or type(message).__name__
        with self.waits.shown(service, reason, deadline_s), self._named(reason):
            return await self._bus.request(service, message, deadline_s=deadline_s)

    async def stream_request(
        self,
        service: str,
        message: Message,
        *,
        idle_s: float,
        reason: str = "",
        is_served: bool = False,
    ) -> AsyncGenerator[Message, None]:
        """Send a request and iterate over its replies; each wait is listed in reports."""
        reason = reason or type(message).__name__
        replies = self._bus.stream_request(service, message, idle_s=idle_s, is_served=is_served)
        async with contextlib.aclosing(replies):
            # Shown around each reply only: between two, this actor works and does not wait.
            while True:
                with self.waits.shown(service, reason, idle_s), self._named(reason):
                    reply = await anext(replies, None)
                if reply is None:
                    return
                yield reply

    def waiting(
        self, target: str, reason: str, *, deadline_s: float, policy_version: int = -1
    ) -> AbstractAsyncContextManager[None]:
        """Report a wait and bound its time."""
        return self.waits.with_deadline(target, reason, deadline_s, policy_version)

    async def offload(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run blocking work in the single worker thread; it counts as busy time."""
        work = functools.partial(self._measured, functools.partial(function, *args, **kwargs))
        if not self._clock.uses_threads:
            return work()
        bound = asyncio.timeout(OFFLOAD_S_MAX)
        try:
            async with bound:
                # A thread starts without the task's context: log lines would lose their actor.
                run = contextvars.copy_context().run
                return await asyncio.get_running_loop().run_in_executor(self._thread, run, work)
        except TimeoutError as error:
            if not bound.expired():
                raise
            name = getattr(function, "__qualname__", repr(function))
            text = f"{self._name}: {name} was still running after {OFFLOAD_S_MAX:g} s"
            raise DeadlineError(text) from error

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a background task under supervision."""
        self.tasks.start(f"{self._name}: {name}", self.meter.run(coroutine))

    def set_gauge(self, name: str, value: float) -> None:
        """Set a metric that the next report includes."""
        self.gauges[name] = value

    async def close(self) -> None:
        """Cancel the background tasks; work in the thread is left to end by itself."""
        await self.tasks.cancel()
        self.tasks.close()
        # No wait: a thread cannot be interrupted, and its work may take up to OFFLOAD_S_MAX.
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _measured(self, work: Callable[[], R]) -> R:
        started = self._clock.monotonic()
        try:
            return work()
        finally:
            self.meter.add(self._clock.monotonic() - started)

    @contextlib.contextmanager
    def _named(self, reason: str) -> Generator[None, None, None]:
        try:
            yield
        except DeadlineError as error:
            raise DeadlineError(f"{self._name}: {reason}: {error}") from error
