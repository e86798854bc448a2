"""The host that runs one actor on a bus.

```
            ┌─────────────── ActorHost ───────────────┐
 bus ──────▶│ follow: one at a time, in order         │──▶ effects published
 (durable) ▶│ consume: num_concurrent at once         │──▶ effects published, then ack
            │ services · on_tick · background tasks   │
            │ ActorReported once a second             │
            └─────────────────────────────────────────┘
 stop: no new work ▶ running work ends (drain_s) ▶ followers stop ▶ actor.stop ▶ services end
```
"""

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable

from penstock.actors.runtime.actor import Actor
from penstock.actors.runtime.background_tasks import Tasks
from penstock.actors.runtime.clock import Clock, SystemClock
from penstock.actors.runtime.consumer import Consumer
from penstock.actors.runtime.event_dispatcher import EventDispatcher
from penstock.actors.runtime.host_context import ActorIdentity, HostContext
from penstock.actors.runtime.in_progress import InProgress, request_item
from penstock.actors.runtime.log_context import enter_actor
from penstock.actors.runtime.processor_time import ProcessorTime
from penstock.actors.runtime.snapshots.following import FoldKeeper, followed
from penstock.messages.base import Event, Message
from penstock.messages.bus import Bus, ObjectStore, Serve
from penstock.messages.control import ActorFailed, ActorStarted
from penstock.messages.errors import BusError, DeadlineError
from penstock.messages.generation import Generate
from penstock.messages.telemetry import ActorReported, ProcessorUsed

log = logging.getLogger(__name__)

REPORT_S = 1.0
"""Default time between two `ActorReported`."""
REPORTS_PER_RECORD = 10
"""Number of reports per durable record of CPU time; reports themselves are only kept in memory."""
REST_S_MAX = 25.0
"""Maximum time in seconds that a followed event or a tick may take after a stop."""


class ActorHost:
    """Runs one actor from start to stop: `await ActorHost(...).run(stop)`."""

    def __init__(  # noqa: PLR0913
        self,
        actor: Actor,
        bus: Bus,
        store: ObjectStore,
        *,
        name: str,
        seed: int,
        clock: Clock | None = None,
        incarnation: str = "",
        drain_s: float = 5.0,
        in_progress: InProgress | None = None,
        report_s: float = REPORT_S,
        processor: ProcessorTime | None = None,
    ) -> None:
        """Prepare the host; nothing runs yet.

        Args:
            actor: The actor; each needs its own host.
            bus: Bus, shared by the actors of a process.
            store: Object store of the run.
            name: Name of the actor, unique in the run, e.g. `generator-west`.
            seed: Seed of the run.
            clock: Source of time; default: the system clock.
            incarnation: Distinguishes several starts under one name; default: time and process id.
            drain_s: Seconds that consumed events may take after a stop before they go back to the
                bus.
            in_progress: Record of the items being worked on, shared by the actors of a process.
            report_s: Seconds between two reports; simulations of whole days report rarely.
            processor: CPU time of the process, shared by its actors; None if it is not measured.

        Raises:
            ConfigError: The actor lacks a handler for an event type that it follows or consumes.

        """
        self._actor = actor
        self._bus = bus
        self._store = store
        self._name = name
        self._clock = clock or SystemClock()
        self._incarnation = incarnation or f"{int(self._clock.now() * 1000):x}-{os.getpid():x}"
        self._drain_s = drain_s
        self._report_s = report_s
        self._ctx = HostContext(
            ActorIdentity(name=name, seed=seed, incarnation=self._incarnation),
            bus=bus,
            store=store,
            clock=self._clock,
        )
        self._in_progress = in_progress or InProgress()
        self._dispatcher = EventDispatcher(actor, self._ctx, bus, self._in_progress)
        self._consumer = Consumer(name, bus, self._dispatcher)
        self._loops = Tasks()
        self._state = asyncio.Lock()
        """Lock held while a followed event or a tick changes the actor's state."""
        self._started_at = self._clock.monotonic()
        self._processor = processor
        if processor is not None:
            processor.join(name, self._ctx.meter)
        self._earlier_cpu_s: dict[str, float] = {}
        """CPU seconds used by earlier starts of this actor, by kind, from `ProcessorUsed`."""
        self._phase = "starting"

    @property
    def not_ready(self) -> str:
        """Reason why the actor cannot serve; empty if it can."""
        return self._phase or self._actor.not_ready()

    @property
    def is_caught_up(self) -> bool:
        """Whether a fold has read what the log held when it started."""
        return self._ctx.is_caught_up

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set and everything is saved.

        Raises:
            Exception: The error that the actor raised, after ActorFailed was published. Events
                that it had not acknowledged are redelivered.

        """
        enter_actor(self._name)
        log.info("starting, incarnation %s, process %d", self._incarnation, os.getpid())
        try:
            await self._run_until(stop)
            log.info("stopped after %d events", self._dispatcher.num_handled)
        except Exception as error:
            log.exception("failed after %d events", self._dispatcher.num_handled)
            await self._announce(
                ActorFailed(
                    actor=self._name,
                    incarnation=self._incarnation,
                    error=f"{type(error).__name__}: {error}",
                    num_restarts=0,
                )
            )
            raise
        finally:
            # The intake first, so that no event starts while the rest is closed.
            await self._consumer.close()
            await self._loops.cancel()
            self._loops.close()
            await self._ctx.close()

    async def _run_until(self, stop: asyncio.Event) -> None:
        started = ActorStarted(actor=self._name, incarnation=self._incarnation, pid=os.getpid())
        await self._bus.publish([started])
        await self._load_earlier_cpu_time()
        # Before the actor's own start, so that a slow one is seen to be alive.
        self._loops.start(f"{self._name}: report", self._report())
        if not await self._start_actor(stop):
            return
        async with self._serving():
            self._start_loops()
            self._phase = ""
            log.info("ready after %.1f s", self._clock.monotonic() - self._started_at)
            await self._wait_for(stop)
            self._phase = "stopping"
            log.info("stopping, %d events in progress", len(self._consumer))
            # Services end last: other actors that are stopping may still need this one.
            await self._drain()
            await self._dispatcher.apply(self._actor.stop(self._ctx))
            await self._record_cpu_time()

    async def _start_actor(self, stop: asyncio.Event) -> bool:
        """Run `actor.start`; return False if a stop interrupted it, so there is nothing to save."""
        starting = asyncio.create_task(self._dispatcher.apply(self._actor.start(self._ctx)))
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return False
            starting.result()
            return True
        finally:
            for task in (starting, stopped):
                task.cancel()
            await asyncio.gather(starting, stopped, return_exceptions=True)

    def _start_loops(self) -> None:
        actor = self._actor
        if actor.follows:
            self._loops.start(f"{self._name}: follow", self._follow())
        if actor.consumes:
            self._consumer.start(actor.role, actor.consumes, actor.num_concurrent)
        if actor.tick_s > 0:
            self._loops.start(f"{self._name}: tick", self._tick())

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncGenerator[None, None]:
        stops: list[Callable[[], Awaitable[None]]] = []
        try:
            for service, serve in self._actor.services().items():
                stops.append(await self._bus.serve(service, self._noted(serve)))
            yield
        finally:
            for stop in stops:
                await stop()

    def _noted(self, serve: Serve) -> Serve:
        """Wrap a service: note its requests as in progress, and serve suspects one at a time."""

        async def noted(message: Message) -> AsyncGenerator[Message]:
            item = request_item(message)
            async with contextlib.AsyncExitStack() as stack:
                if isinstance(message, Generate) and message.is_suspect:
                    await stack.enter_async_context(self._in_progress.alone("Generate"))
                if item:
                    stack.enter_context(self._in_progress.noted(item))
                replies = serve(message)
                # When the client leaves, the service's own clean-up must run before we return.
                if (close := getattr(replies, "aclose", None)) is not None:
                    stack.push_async_callback(close)
                async for reply in replies:
                    yield reply

        return noted

    async def _wait_for(self, stop: asyncio.Event) -> None:
        """Wait for `stop`; raise the first failure of any task."""
        stopped = asyncio.create_task(stop.wait())
        failures = [self._ctx.tasks.failed, self._loops.failed, *self._consumer.failures]
        try:
            await asyncio.wait([stopped, *failures], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        for failure in failures:
            if failure.done():
                failure.result()

    async def _drain(self) -> None:
        """Let running work end, then stop the followers between two events."""
        await self._consumer.drain(self._drain_s)
        # The lock: a follower must not be cancelled while its event is half applied.
        try:
            async with asyncio.timeout(REST_S_MAX):
                await self._state.acquire()
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._name}: a handler was still running {REST_S_MAX:g} s after the stop"
            ) from error
        await self._loops.cancel()
        self._state.release()

    async def _follow(self) -> None:
        actor = self._actor
        if actor.saved:
            await self._follow_fold()
            return
        async with contextlib.aclosing(self._bus.follow(actor.follows)) as deliveries:
            async for delivery in deliveries:
                # Per event, so that a stop interrupts only between two events.
                async with self._state:
                    await self._dispatcher.handle(delivery)

    async def _follow_fold(self) -> None:
        """Follow from the newest snapshot on, and save one from time to time."""
        ctx, actor = self._ctx, self._actor
        keeper = FoldKeeper(actor, self._name, self._store, ctx.monotonic, ctx.offload)
        # The lock: no tick may see a state that is restored in part.
        async with self._state:
            await keeper.restore()
        started = self._clock.monotonic()

        def catch_up() -> None:
            ctx.is_caught_up = True
            log.info("caught up with the log in %.1f s", self._clock.monotonic() - started)

        deliveries = followed(self._bus, actor.follows, keeper.positions, catch_up)
        async with contextlib.aclosing(deliveries):
            async for delivery in deliveries:
                async with self._state:
                    await self._dispatcher.handle(delivery)
                    keeper.note(delivery)
                    if keeper.is_due:
                        await keeper.save()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._actor.tick_s)
            async with self._state:
                await self._dispatcher.apply(self._actor.on_tick(self._ctx))

    async def _report(self) -> None:
        for number in itertools.count(1):
            await asyncio.sleep(self._report_s)
            await self._announce(
                ActorReported(
                    actor=self._name,
                    role=self._actor.role,
                    at=self._clock.now(),
                    busy_s=self._ctx.meter.busy_s,
                    uptime_s=self._clock.monotonic() - self._started_at,
                    num_handled=self._dispatcher.num_handled,
                    num_queued=len(self._consumer),
                    gauges=dict(self._ctx.gauges),
                    waits=self._ctx.waits.current(),
                    processor_s=self._total_cpu_s(),
                )
            )
            if number % REPORTS_PER_RECORD == 0:
                await self._record_cpu_time()

    async def _load_earlier_cpu_time(self) -> None:
        """Read the CPU time that earlier starts of this actor recorded."""
        if self._processor is None:
            return
        used = await self._ctx.last(ProcessorUsed, self._name)
        self._earlier_cpu_s = used.processor_s if used else {}

    async def _record_cpu_time(self) -> None:
        """Publish the CPU time so far durably: reports are only kept in memory."""
        if used_s := self._total_cpu_s():
            event = ProcessorUsed(actor=self._name, role=self._actor.role, processor_s=used_s)
            await self._announce(event)

    def _total_cpu_s(self) -> dict[str, float]:
        if self._processor is None:
            return {}
        now = {"process": self._processor.used_s(self._name), **self._actor.processor_s()}
        return {kind: used_s + self._earlier_cpu_s.get(kind, 0.0) for kind, used_s in now.items()}

    async def _announce(self, event: Event) -> None:
        """Publish an event that nothing depends on; log a failure instead of raising it."""
        try:
            await self._bus.publish([event])
        except (BusError, TimeoutError) as error:
            log.warning("could not publish %s: %s", type(event).__name__, error)
