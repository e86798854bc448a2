"""The context that the host gives to its actor.

The waits in progress of one actor: its edges of the wait-for graph.
"""

import asyncio
import contextlib
import contextvars
import functools
import itertools
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

WAITS_REPORTED_MAX = 32
"""Maximum waits in one report, oldest first."""


class Waits:
    """Keeps what is waited for, since when."""

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
        """Show a wait that is bounded elsewhere, and name it in that bound's error."""
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
        """Show a wait and end it at its deadline.

        Raises:
            DeadlineError: The body did not end in time.

        """
        bound = asyncio.timeout(deadline_s)
        with self.shown(target, reason, deadline_s, policy_version):
            try:
                async with bound:
                    yield
            except TimeoutError as error:
                if not bound.expired() or isinstance(error, DeadlineError):
                    raise
                raise DeadlineError(
                    f"{self._actor} waited {deadline_s:g} s for {target}: {reason}"
                ) from error


OFFLOAD_S_MAX = 1800.0
"""Longest piece of blocking work; a thread cannot be ended, but its actor fails, and is seen."""

CHANGES_MAX = 32
"""Attempts at one change, while other processes change the same."""
CHANGE_PAUSE_S = 0.005
NUM_CHANGED_MAX = 1024

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=Event)


class ActorIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Who an actor is."""

    name: str
    seed: int
    """The run's."""
    incarnation: str
    """Distinguishes the starts of one name."""


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
        self._changed: dict[tuple[str, str], Delivery] = {}

    @property
    def run_id(self) -> str:
        """The run."""
        return self._bus.run_id

    @property
    def actor(self) -> str:
        """Name of the actor."""
        return self._name

    @property
    def random(self) -> random.Random:
        """Seeded by run seed and actor name."""
        return self._random

    @property
    def store(self) -> ObjectStore:
        """The run's objects."""
        return self._store

    def now(self) -> float:
        """Unix seconds."""
        return self._clock.now()

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return self._clock.monotonic()

    def new_id(self, prefix: str) -> str:
        """Return an id unique in the run: a restarted actor counts under another incarnation."""
        self._num_ids += 1
        return f"{prefix}-{self._name}-{self._incarnation}-{self._num_ids}"

    async def sleep(self, duration_s: float) -> None:
        """Sleep on the actor's clock."""
        await asyncio.sleep(duration_s)

    async def publish(self, *events: Event) -> list[PublishReceipt]:
        """Publish durably."""
        return await self._bus.publish(events) if events else []

    async def last(self, event_type: type[E], key: str | None = None) -> E | None:
        """Return the newest stored event of a type, or None."""
        delivery = await self._bus.last(event_type, key)
        if delivery is None:
            return None
        assert isinstance(delivery.event, event_type)
        return delivery.event

    async def change(self, event_type: type[E], key: str, make: Callable[[E | None], E]) -> E:
        """Replace the newest event of a key, atomically."""
        name = (event_type.__name__, key)
        for attempt in range(CHANGES_MAX):
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
            await asyncio.sleep(self._random.random() * CHANGE_PAUSE_S * attempt)
        raise BusError(f"{event_type.__name__} {key}: others changed it {CHANGES_MAX} times")

    def _note_changed(self, name: tuple[str, str], event: Event, receipt: PublishReceipt) -> None:
        """Remember what was stored, so that the next change need not read it; the oldest goes."""
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
        """Ask and wait, visibly."""
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
        """Ask and iterate over the replies, visibly."""
        reason = reason or type(message).__name__
        replies = self._bus.stream_request(service, message, idle_s=idle_s, is_served=is_served)
        async with contextlib.aclosing(replies):
            while True:
                with self.waits.shown(service, reason, idle_s), self._named(reason):
                    reply = await anext(replies, None)
                if reply is None:
                    return
                yield reply

    def waiting(
        self, target: str, reason: str, *, deadline_s: float, policy_version: int = -1
    ) -> AbstractAsyncContextManager[None]:
        """Bound and publish a wait."""
        return self.waits.with_deadline(target, reason, deadline_s, policy_version)

    async def offload(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run blocking work in the one worker thread; counted as busy."""
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
        """Show a number in the next report."""
        self.gauges[name] = value

    async def close(self) -> None:
        """End the background tasks; work in the thread ends by itself."""
        await self.tasks.cancel()
        self.tasks.close()
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
