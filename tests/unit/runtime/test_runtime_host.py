"""The host keeps its promises: order, effects before acks, drains, dead letters, failures."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from tests.contract.bus.bus_world import saved, step, task
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import Faults, MemoryServer
from tests.support.virtual_clock import VirtualClock, run_virtual

from penstock.actors.runtime.actor import Actor
from penstock.actors.runtime.host import ActorHost
from penstock.actors.runtime.processor_time import ProcessorTime
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.control import ActorFailed, ActorStarted, MessageRejected
from penstock.messages.errors import ConfigError, CorruptDataError, DeadlineError
from penstock.messages.rpc import Ack
from penstock.messages.task import StartRollout
from penstock.messages.telemetry import ActorReported, ProcessorUsed
from penstock.messages.training import CheckpointSaved, StepCompleted


class World:
    def __init__(self, faults: Faults | None = None) -> None:
        self.clock = VirtualClock()
        self.server = MemoryServer(seed=1, clock=self.clock, faults=faults)
        self.store = MemoryStore()
        self.bus = self.connect("test")
        self.stop = asyncio.Event()

    def connect(self, name: str) -> MemoryBus:
        return MemoryBus(self.server, run_id="r", store=self.store, name=name)

    def host(self, actor: Actor, name: str = "a", **options: Any) -> asyncio.Task[None]:
        options = {"incarnation": "i1", "drain_s": 5.0} | options
        host = ActorHost(
            actor, self.connect(name), self.store, name=name, seed=7, clock=self.clock, **options
        )
        return asyncio.create_task(host.run(self.stop))

    async def log(self, *types: type) -> list[Any]:
        return [d.event async for d in self.bus.follow(types, stop_at_end=True)]


def simulated(test: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test in virtual time."""

    async def main() -> None:
        await test(World())

    def run() -> None:
        run_virtual(main())

    run.__name__ = test.__name__
    return run


class Follower(Actor):
    role = "follower"
    follows = (StepCompleted,)

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.now_in = 0

    async def on_step_completed(self, event, ctx):
        self.now_in += 1
        assert self.now_in == 1, "one at a time"
        await ctx.sleep(0.1)
        self.now_in -= 1
        self.steps.append(event.step)
        return [saved(event.step)]

    async def stop(self, ctx):
        return [saved(1000)]


class Worker(Actor):
    role = "worker"
    consumes = (StartRollout,)
    num_concurrent = 3

    def __init__(self, handle) -> None:
        self.handle = handle

    async def on_start_rollout(self, event, ctx):
        return await self.handle(int(event.rollout_id[1:]), ctx)


@simulated
async def test_followed_events_are_handled_in_order_and_effects_are_published(world):
    actor = Follower()
    running = world.host(actor)
    await world.bus.publish([step(n) for n in range(5)])
    await asyncio.sleep(2)
    world.stop.set()
    await running
    assert actor.steps == [0, 1, 2, 3, 4]
    assert await world.log(CheckpointSaved) == [saved(n) for n in (0, 1, 2, 3, 4, 1000)]
    (started,) = await world.log(ActorStarted)
    assert (started.actor, started.incarnation) == ("a", "i1")


@simulated
async def test_a_stop_never_interrupts_a_followed_event(world):
    actor = Follower()
    running = world.host(actor)
    await world.bus.publish([step(n) for n in range(50)])
    await asyncio.sleep(1.05)
    world.stop.set()
    await running
    assert actor.now_in == 0
    stored = await world.log(CheckpointSaved)
    assert stored == [saved(n) for n in actor.steps] + [saved(1000)]


@simulated
async def test_work_runs_concurrently_and_is_acked_after_its_effects(world):
    most = now = 0

    async def handle(n, ctx):
        nonlocal most, now
        now += 1
        most = max(most, now)
        await ctx.sleep(1.0)
        now -= 1
        return [step(n)]

    await world.bus.publish([task(n) for n in range(9)])
    running = world.host(Worker(handle))
    await asyncio.sleep(3.5)
    world.stop.set()
    await running
    assert most == 3
    assert {e.step for e in await world.log(StepCompleted)} == set(range(9))
    assert world.server.logs["tasks"].messages() == []


@simulated
async def test_long_work_is_kept_by_heartbeats(world):
    started = []

    async def handle(n, ctx):
        started.append(n)
        await ctx.sleep(100.0)
        return [step(n)]

    await world.bus.publish([task(1)])
    running = world.host(Worker(handle))
    await asyncio.sleep(101)
    world.stop.set()
    await running
    assert started == [1]


@simulated
async def test_a_drain_lets_work_end_and_gives_back_what_does_not(world):
    async def handle(n, ctx):
        await ctx.sleep(3.0 if n == 1 else 60.0)
        return [step(n)]

    await world.bus.publish([task(1), task(2)])
    running = world.host(Worker(handle))
    await asyncio.sleep(1)
    world.stop.set()
    await running
    assert await world.log(StepCompleted) == [step(1)]
    items = world.bus.consume("worker", [StartRollout], num_pending_max=3)
    item = await asyncio.wait_for(anext(items), 1.0)
    assert item.delivery.event == task(2) and item.delivery.num_delivered == 2


@simulated
async def test_an_invalid_event_goes_to_the_dead_letters_and_work_goes_on(world):
    async def handle(n, ctx):
        if n == 1:
            raise CorruptDataError("files: digest")
        return [step(n)]

    await world.bus.publish([task(1), task(2)])
    running = world.host(Worker(handle))
    await asyncio.sleep(1)
    world.stop.set()
    await running
    assert await world.log(StepCompleted) == [step(2)]
    (letter,) = await world.log(MessageRejected)
    assert letter.cause == "CorruptDataError: files: digest"
    assert (letter.actor, letter.source_subject) == ("a", "ps.r.tasks.StartRollout.r1")
    assert world.server.logs["tasks"].messages() == []


@simulated
async def test_work_whose_outside_fails_is_tried_again(world):
    tries = []

    async def handle(n, ctx):
        tries.append(ctx.monotonic())
        if len(tries) < 3:
            await ctx.request("nobody", Ack(), deadline_s=0.5, reason="a turn")
        return [step(n)]

    await world.bus.publish([task(1)])
    running = world.host(Worker(handle))
    await asyncio.sleep(10)
    world.stop.set()
    await running
    assert len(tries) == 3
    assert await world.log(StepCompleted) == [step(1)]


@simulated
async def test_a_failed_background_task_fails_the_actor(world):
    class Spawns(Actor):
        role = "spawns"

        async def start(self, ctx):
            ctx.spawn("engine", self.engine(ctx))
            return ()

        async def engine(self, ctx):
            await ctx.sleep(1.0)
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        await world.host(Spawns())
    assert [e.error for e in await world.log(ActorFailed)] == ["OSError: no space"]


@simulated
async def test_services_answer_and_ticks_tick(world):
    class Serves(Actor):
        role = "serves"
        tick_s = 0.5
        ticks = 0

        def services(self):
            return {"clock": self.answer}

        async def answer(self, message) -> AsyncIterator[Ack]:
            yield Ack()

        async def on_tick(self, ctx):
            self.ticks += 1
            return [step(self.ticks)]

    running = world.host(Serves())
    assert await world.bus.request("clock", Ack(), deadline_s=5) == Ack()
    await asyncio.sleep(2.1)
    world.stop.set()
    await running
    assert [e.step for e in await world.log(StepCompleted)] == [1, 2, 3, 4]
    with pytest.raises(DeadlineError):
        await world.bus.request("clock", Ack(), deadline_s=1)


@simulated
async def test_waits_are_reported_while_they_last_and_name_their_deadline(world):
    errors = []

    async def handle(n, ctx):
        with contextlib.suppress(DeadlineError):
            async with ctx.waiting("judge", "verdict of g3", deadline_s=2.5, policy_version=4):
                await asyncio.Event().wait()
        try:
            async with ctx.waiting("judge", "verdict of g3", deadline_s=1.0):
                await asyncio.Event().wait()
        except DeadlineError as error:
            errors.append(str(error))
        ctx.set_gauge("depth", 3.0)
        return ()

    await world.bus.publish([task(1)])
    running = world.host(Worker(handle))
    await asyncio.sleep(5.5)
    world.stop.set()
    await running
    assert errors == ["a waited 1 s for judge: verdict of g3"]
    reports = await world.log(ActorReported)
    (wait,) = reports[0].waits
    assert (wait.target, wait.reason, wait.policy_version) == ("judge", "verdict of g3", 4)
    assert reports[-1].waits == [] and reports[-1].gauges == {"depth": 3.0}
    assert (reports[0].num_queued, reports[-1].num_handled) == (1, 1)


@simulated
async def test_ids_differ_between_actors_and_starts_and_randomness_does_not(world):
    seen = {}

    class Ids(Actor):
        role = "ids"

        async def start(self, ctx):
            seen[ctx.actor, self.start_no] = (
                ctx.new_id("x"), ctx.new_id("x"), ctx.random.random()
            )  # fmt: skip
            return ()

    for name, start in (("a", 1), ("a", 2), ("b", 1)):
        actor = Ids()
        actor.start_no = start
        world.stop.set()
        await world.host(actor, name, incarnation=f"i{start}")
    ids = [i for first, second, _ in seen.values() for i in (first, second)]
    assert len(set(ids)) == 6
    assert seen["a", 1][2] == seen["a", 2][2] != seen["b", 1][2]


def test_a_missing_handler_is_an_error_at_once():
    class Lacks(Actor):
        role = "lacks"
        follows = (StepCompleted,)

    class Mixes(Actor):
        role = "mixes"
        consumes = (StepCompleted, StartRollout)

        async def on_step_completed(self, event, ctx):
            return ()

        async def on_start_rollout(self, event, ctx):
            return ()

    async def main() -> None:
        world = World()
        with pytest.raises(ConfigError, match="on_step_completed"):
            await world.host(Lacks())
        with pytest.raises(ConfigError, match="one stream"):
            await world.host(Mixes())

    run_virtual(main())


@simulated
async def test_a_stop_cuts_a_long_start_short(world):
    class Trains(Actor):
        role = "trains"

        async def start(self, ctx):
            await ctx.sleep(3600)
            return [step(1)]

        async def stop(self, ctx):
            raise AssertionError("nothing to save")

    running = world.host(Trains())
    await asyncio.sleep(10)
    world.stop.set()
    await running
    assert asyncio.get_running_loop().time() < 11
    assert await world.log(StepCompleted) == []


@simulated
async def test_a_followed_event_that_outlasts_the_stop_is_a_failure(world):
    class Hangs(Actor):
        role = "hangs"
        follows = (StepCompleted,)

        async def on_step_completed(self, event, ctx):
            await ctx.sleep(3600)
            return ()

    await world.bus.publish([step(1)])
    running = world.host(Hangs())
    await asyncio.sleep(1)
    world.stop.set()
    with pytest.raises(DeadlineError, match="a: a handler was still running"):
        await running


@simulated
async def test_processor_time_goes_on_where_an_earlier_start_left_it(world):
    class Busy(Actor):
        role = "sandbox"

        def processor_s(self):
            return {"machines": 2.0}

    for number, measured_s in enumerate((3.0, 0.5), start=1):
        world.stop = asyncio.Event()
        time = ProcessorTime(lambda seconds=measured_s: seconds)
        running = world.host(Busy(), incarnation=f"i{number}", processor=time)
        await asyncio.sleep(2.5)
        world.stop.set()
        await running
    reports = [one.processor_s for one in await world.log(ActorReported)]
    assert reports[0] == {"process": 3.0, "machines": 2.0}
    assert reports[-1] == {"process": 3.5, "machines": 4.0}
    (kept,) = await world.log(ProcessorUsed)
    assert kept.processor_s == reports[-1], "the latest wins"
