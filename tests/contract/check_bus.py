"""Conformance of buses: what `Bus` promises, as checks that every bus must pass.

`world.bus(name)` connects one more simulated or real process to one server and run.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

import pytest

from penstock.messages.base import Message, Stream
from penstock.messages.bus import Bus
from penstock.messages.control import MessageRejected, RunFinished
from penstock.messages.errors import (
    BusClosedError,
    ConfigError,
    DeadlineError,
    NotFoundError,
    QueueFullError,
    RemoteCallError,
)
from penstock.messages.generation import AbortGeneration, Ack
from penstock.messages.pacing import CreditsChanged, EvalRequested
from penstock.messages.task import Purpose, Sampling, Split, StartRollout, Task
from penstock.messages.telemetry import MidtrainProgressed
from penstock.messages.training import CheckpointSaved, MidtrainCompleted, StepCompleted

DEADLINE_S = 20.0
T = TypeVar("T")


class World(Protocol):
    """One server and one run."""

    async def bus(self, name: str = "tester") -> Bus:
        """Connect."""
        ...

    async def inject(self, stream: Stream, suffix: str, data: bytes) -> None:
        """Store raw bytes under `ps.<run>.<stream>.<suffix>`."""
        ...

    async def restart_server(self) -> None:
        """Kill -9 and start again."""
        ...


CHECKS: list[Callable[[World], Awaitable[None]]] = []


def check(function: Callable[[World], Awaitable[None]]) -> Callable[[World], Awaitable[None]]:
    CHECKS.append(function)
    return function


def step(n: int, digest: str = "d") -> StepCompleted:
    return StepCompleted(
        step=n, policy_version=n, weights_digest=digest, optimizer_digest="o", metrics={"loss": 0.5}
    )


def saved(n: int) -> CheckpointSaved:
    return CheckpointSaved(step=n, object_key=f"k{n}", weights_digest="d")


def credits(n: int) -> CreditsChanged:
    return CreditsChanged(
        policy_version=n,
        num_groups_granted=n,
        num_groups_trained=0,
        num_groups_discarded=0,
        num_groups_allowed=n,
        staleness_max=1,
    )


def progress(n: int) -> MidtrainProgressed:
    return MidtrainProgressed(num_tokens=n, num_tokens_total=10, loss=1.0)


def task(n: int, text: str = "fix it") -> StartRollout:
    return StartRollout(
        rollout_id=f"r{n}",
        group_id="g",
        group_index=0,
        group_size=1,
        member=0,
        purpose=Purpose.TRAIN,
        task=Task(task_id="t", rung="a", split=Split.TRAIN, instruction=text, files={}),
        sampling=Sampling(),
        policy_version=0,
    )


async def take(iterator: AsyncIterator[T], num: int) -> list[T]:
    """Take exactly `num`, within the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        return [await anext(iterator) for _ in range(num)]


async def is_silent(iterator: AsyncIterator[T], for_s: float = 0.3) -> bool:
    """Tell that nothing comes. The iterator cannot be used after."""
    try:
        await asyncio.wait_for(anext(iterator), for_s)
    except TimeoutError:
        return True
    return False


@check
async def publishing_a_key_twice_stores_it_once(world: World) -> None:
    bus = await world.bus()
    (first,) = await bus.publish([step(1, "first")])
    (second,) = await bus.publish([step(1, "second")])
    assert (first.is_duplicate, second.is_duplicate, second.sequence) == (False, True, 0)
    assert first.sequence > 0
    stored = await bus.last(StepCompleted, "1")
    assert stored is not None and stored.event == step(1, "first")


@check
async def of_two_publishers_one_wins(world: World) -> None:
    buses = [await world.bus(name) for name in ("a", "b", "c")]
    receipts = await asyncio.gather(
        *(bus.publish([step(7, str(n))]) for n, bus in enumerate(buses))
    )
    winners = [n for n, (receipt,) in enumerate(receipts) if not receipt.is_duplicate]
    assert len(winners) == 1
    stored = await buses[0].last(StepCompleted, "7")
    assert stored is not None and stored.event == step(7, str(winners[0]))


@check
async def a_batch_is_stored_in_order_and_skips_what_is_there(world: World) -> None:
    bus = await world.bus()
    await bus.publish([step(2)])
    receipts = await bus.publish([step(1), step(2), saved(1), step(3), step(3), task(1), task(1)])
    assert [receipt.is_duplicate for receipt in receipts] == [
        False, True, False, False, True, False, True,
    ]  # fmt: skip
    log = [d.event async for d in bus.follow([StepCompleted, CheckpointSaved], stop_at_end=True)]
    assert log == [step(2), step(1), saved(1), step(3)]


@check
async def large_batches_keep_their_order(world: World) -> None:
    bus = await world.bus()
    events = [step(n) for n in range(1200)]
    receipts = await bus.publish(events)
    sequences = [receipt.sequence for receipt in receipts]
    assert sequences == sorted(set(sequences))
    assert [d.event async for d in bus.follow([StepCompleted], stop_at_end=True)] == events


@check
async def the_latest_credits_win(world: World) -> None:
    bus = await world.bus()
    for n in range(5):
        await bus.publish([credits(n)])
    log = [d.event async for d in bus.follow([CreditsChanged], stop_at_end=True)]
    assert log == [credits(4)]


@check
async def following_replays_and_goes_on_live(world: World) -> None:
    bus = await world.bus()
    receipts = await bus.publish([step(1), saved(1), step(2)])
    deliveries = bus.follow([StepCompleted])
    assert [d.event for d in await take(deliveries, 2)] == [step(1), step(2)]
    await bus.publish([saved(2), step(3)])
    (live,) = await take(deliveries, 1)
    assert live.event == step(3) and live.stream is Stream.TRAINING
    resumed = bus.follow([StepCompleted], after={Stream.TRAINING: receipts[1].sequence})
    assert [d.event for d in await take(resumed, 2)] == [step(2), step(3)]


@check
async def reading_to_the_end_merges_streams_by_time(world: World) -> None:
    bus = await world.bus()
    types = [StepCompleted, RunFinished, EvalRequested]
    assert [d async for d in bus.follow(types, stop_at_end=True)] == []
    for n in range(4):
        await bus.publish([step(n)])
        await asyncio.sleep(0.001)
        await bus.publish([EvalRequested(eval_id=f"e{n}", policy_version=n, num_tasks=1)])
        await asyncio.sleep(0.001)
    await bus.publish([RunFinished(reason="done", step=4)])
    deliveries = [d async for d in bus.follow(types, stop_at_end=True)]
    names = [type(d.event).__name__ for d in deliveries]
    assert names == ["StepCompleted", "EvalRequested"] * 4 + ["RunFinished"]
    times = [d.stored_at for d in deliveries]
    assert times == sorted(times)


@check
async def a_work_queue_is_not_followed(world: World) -> None:
    bus = await world.bus()
    with pytest.raises(ConfigError, match="StartRollout"):
        await anext(bus.follow([StepCompleted, StartRollout]))


@check
async def the_last_event_is_found_by_type_and_key(world: World) -> None:
    bus = await world.bus()
    assert await bus.last(StepCompleted) is None
    await bus.publish([step(1), step(2), saved(9)])
    newest, one = await bus.last(StepCompleted), await bus.last(StepCompleted, "1")
    assert newest is not None and newest.event == step(2)
    assert one is not None and one.event == step(1) and one.sequence < newest.sequence
    assert await bus.last(StepCompleted, "9") is None
    assert await bus.last(MidtrainCompleted) is None


@check
async def work_is_shared_and_settled_once(world: World) -> None:
    buses = [await world.bus(name) for name in ("a", "b")]
    await buses[0].publish([task(n) for n in range(30)])
    seen: list[str] = []
    done = asyncio.Event()

    async def work(bus: Bus) -> None:
        async for item in bus.consume("workers", [StartRollout], num_pending_max=4):
            await asyncio.sleep(0.001)
            await item.ack()
            seen.append(item.delivery.event.key())
            if len(seen) == 30:
                done.set()

    workers = [asyncio.create_task(work(bus)) for bus in buses]
    await asyncio.wait_for(done.wait(), DEADLINE_S)
    for bus in buses:
        await bus.close()
    await asyncio.gather(*workers)
    assert sorted(seen) == sorted(f"r{n}" for n in range(30))
    late = (await world.bus("c")).consume("workers", [StartRollout], num_pending_max=4)
    assert await is_silent(late)


@check
async def at_most_num_pending_max_are_out(world: World) -> None:
    bus = await world.bus()
    await bus.publish([task(n) for n in range(5)])
    items = bus.consume("workers", [StartRollout], num_pending_max=2)
    first, second = await take(items, 2)
    third = asyncio.ensure_future(anext(items))
    await asyncio.wait([third], timeout=0.2)
    assert not third.done()
    await first.ack()
    item = await asyncio.wait_for(third, DEADLINE_S)
    assert [i.delivery.event.key() for i in (first, second, item)] == ["r0", "r1", "r2"]


@check
async def what_a_lost_reader_holds_does_not_hold_up_another(world: World) -> None:
    lost, other = await world.bus("a"), await world.bus("b")
    await lost.publish([task(n) for n in range(4)])
    held = await take(lost.consume("workers", [StartRollout], num_pending_max=2), 2)
    taken = await take(other.consume("workers", [StartRollout], num_pending_max=2), 2)
    assert [i.delivery.event.key() for i in (*held, *taken)] == ["r0", "r1", "r2", "r3"]


@check
async def unsettled_work_comes_again(world: World) -> None:
    bus = await world.bus()
    await bus.publish([task(1)])
    items = bus.consume("workers", [StartRollout], num_pending_max=2, ack_wait_s=0.3)
    first, again = await take(items, 2)
    assert (first.delivery.num_delivered, again.delivery.num_delivered) == (1, 2)
    assert again.delivery.event == task(1)
    await again.ack()
    assert await is_silent(items, 0.5)


@check
async def progress_holds_redelivery_off(world: World) -> None:
    bus = await world.bus()
    await bus.publish([task(1)])
    items = bus.consume("workers", [StartRollout], num_pending_max=2, ack_wait_s=0.4)
    (item,) = await take(items, 1)
    again = asyncio.ensure_future(anext(items))
    for _ in range(8):
        await item.in_progress()
        await asyncio.wait([again], timeout=0.1)
    assert not again.done()
    assert (await asyncio.wait_for(again, DEADLINE_S)).delivery.num_delivered == 2


@check
async def refused_work_comes_again_after_its_delay(world: World) -> None:
    bus = await world.bus()
    await bus.publish([task(1)])
    items = bus.consume("workers", [StartRollout], num_pending_max=2)
    (item,) = await take(items, 1)
    loop = asyncio.get_running_loop()
    refused_at = loop.time()
    await item.nak(0.3)
    (again,) = await take(items, 1)
    assert loop.time() - refused_at > 0.25
    assert again.delivery.num_delivered == 2
    await again.nak()
    (third,) = await take(items, 1)
    await third.term()
    await third.ack()
    assert await is_silent(items)


@check
async def undecodable_work_goes_to_the_dead_letters(world: World) -> None:
    bus = await world.bus("worker-1")
    await world.inject(Stream.TASKS, "StartRollout.bad", b"\xc1 not msgpack")
    await bus.publish([task(1)])
    items = bus.consume("workers", [StartRollout], num_pending_max=1)
    (item,) = await take(items, 1)
    assert item.delivery.event == task(1)
    rejected = await bus.last(MessageRejected)
    assert rejected is not None and isinstance(rejected.event, MessageRejected)
    assert rejected.event.data == b"\xc1 not msgpack"
    assert rejected.event.source_subject.endswith("StartRollout.bad")
    assert (rejected.event.source_stream, rejected.event.actor) == ("tasks", "worker-1")
    assert "undecodable" in rejected.event.cause


@check
async def a_follower_skips_the_undecodable_and_says_so_once(world: World) -> None:
    bus = await world.bus("reader-1")
    await world.inject(
        Stream.TRAINING, "StepCompleted.1", b"\x82\xa4type\xadStepCompleted\xa4step\xa1x"
    )
    await bus.publish([step(2)])
    for _ in range(2):
        assert [d.event async for d in bus.follow([StepCompleted], stop_at_end=True)] == [step(2)]
    letters = [d.event async for d in bus.follow([MessageRejected], stop_at_end=True)]
    assert len(letters) == 1 and "$.step" in letters[0].cause


@check
async def large_payloads_travel_by_claim_check(world: World) -> None:
    bus = await world.bus()
    big = task(1, "x" * 3_000_000)
    await bus.publish([big, task(2)])
    (item, small) = await take(bus.consume("workers", [StartRollout], num_pending_max=2), 2)
    assert item.delivery.event == big and small.delivery.event == task(2)
    stored = await bus.last(StartRollout, "r1")
    assert stored is not None and stored.event == big


async def _echo(message: Message) -> AsyncIterator[Message]:
    """Answer an AbortGeneration of id `n` with n numbered replies."""
    assert isinstance(message, AbortGeneration)
    for n in range(int(message.request_id)):
        yield AbortGeneration(request_id=str(n))


@check
async def a_request_gets_the_first_reply(world: World) -> None:
    server, asker = await world.bus("a"), await world.bus("b")
    stop = await server.serve("echo.x", _echo)
    reply = await asker.request("echo.x", AbortGeneration(request_id="3"), deadline_s=DEADLINE_S)
    assert reply == AbortGeneration(request_id="0")
    await stop()
    with pytest.raises(DeadlineError, match=r"echo\.x"):
        await asker.request("echo.x", AbortGeneration(request_id="3"), deadline_s=0.3)


@check
async def a_request_waits_for_its_server(world: World) -> None:
    server, asker = await world.bus("a"), await world.bus("b")
    asked = asyncio.create_task(
        asker.request("echo.x", AbortGeneration(request_id="1"), deadline_s=DEADLINE_S)
    )
    await asyncio.sleep(0.2)
    await server.serve("echo.x", _echo)
    assert await asked == AbortGeneration(request_id="0")


@check
async def replies_stream_in_order_to_their_end(world: World) -> None:
    server, asker = await world.bus("a"), await world.bus("b")
    await server.serve("echo", _echo)

    async def ask(num: int) -> list[str]:
        request = AbortGeneration(request_id=str(num))
        replies = asker.stream_request("echo", request, idle_s=DEADLINE_S)
        return [reply.request_id async for reply in replies]

    answers = await asyncio.gather(*(ask(num) for num in (0, 1, 5, 200)))
    assert answers == [[str(n) for n in range(num)] for num in (0, 1, 5, 200)]


@check
async def an_idle_stream_meets_its_deadline(world: World) -> None:
    bus = await world.bus()

    async def stalls(message: Message) -> AsyncIterator[Message]:
        yield Ack()
        await asyncio.sleep(DEADLINE_S)

    stop = await bus.serve("stalls", stalls)
    replies = bus.stream_request("stalls", Ack(), idle_s=0.3)
    assert await take(replies, 1) == [Ack()]
    with pytest.raises(DeadlineError, match="stalls"):
        await anext(replies)
    await stop()


@check
async def errors_of_a_server_are_typed_at_the_asker(world: World) -> None:
    bus = await world.bus()
    errors = [
        (ValueError("bad"), "invalid"),
        (QueueFullError("full"), "busy"),
        (NotFoundError("lease l1"), "gone"),
        (RuntimeError("broke"), "failed"),
    ]

    async def fails(message: Message) -> AsyncIterator[Message]:
        assert isinstance(message, AbortGeneration)
        yield Ack()
        raise errors[int(message.request_id)][0]

    await bus.serve("fails", fails)
    for n, (error, kind) in enumerate(errors):
        replies = bus.stream_request("fails", AbortGeneration(request_id=str(n)), idle_s=DEADLINE_S)
        assert await anext(replies) == Ack()
        with pytest.raises(RemoteCallError, match=str(error)) as caught:
            await anext(replies)
        assert caught.value.kind == kind


@check
async def one_of_many_servers_answers(world: World) -> None:
    buses = [await world.bus(f"s{n}") for n in range(3)]
    calls: list[int] = []

    def make(n: int) -> Callable[[Message], AsyncIterator[Message]]:
        async def serve(message: Message) -> AsyncIterator[Message]:
            calls.append(n)
            yield Ack()

        return serve

    for n, bus in enumerate(buses):
        await bus.serve("one", make(n))
        await bus.serve("all", make(10 + n), shared=False)
    for _ in range(30):
        await buses[0].request("one", Ack(), deadline_s=DEADLINE_S)
    assert len(calls) == 30 and len(set(calls)) > 1
    calls.clear()
    await buses[0].request("all", Ack(), deadline_s=DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        while len(calls) < 3:
            await asyncio.sleep(0.01)
    assert sorted(calls) == [10, 11, 12]


@check
async def closing_ends_iterators(world: World) -> None:
    bus = await world.bus()

    async def read() -> list[object]:
        return [d async for d in bus.follow([StepCompleted])]

    async def work() -> list[object]:
        return [i async for i in bus.consume("workers", [StartRollout], num_pending_max=1)]

    tasks = [asyncio.create_task(read()), asyncio.create_task(work())]
    await asyncio.sleep(0.1)
    await bus.close()
    await bus.close()
    assert await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S) == [[], []]
    with pytest.raises(BusClosedError):
        await bus.publish([step(1)])


@check
async def a_killed_server_loses_and_repeats_nothing(world: World) -> None:
    bus, reader = await world.bus("a"), await world.bus("b")
    batches = [[step(10 * b + n) for n in range(b % 7 + 1)] for b in range(60)]
    expected = [event for batch in batches for event in batch]
    followed: list[object] = []

    async def publish() -> list[bool]:
        duplicates: list[bool] = []
        for batch in batches:
            duplicates += [receipt.is_duplicate for receipt in await bus.publish(batch)]
            await asyncio.sleep(0.002)
        return duplicates

    async def follow() -> None:
        async with contextlib.aclosing(reader.follow([StepCompleted])) as deliveries:
            async for delivery in deliveries:
                followed.append(delivery.event)
                if len(followed) == len(expected):
                    return

    publishing, following = asyncio.create_task(publish()), asyncio.create_task(follow())
    for _ in range(2):
        await asyncio.sleep(0.06)
        await world.restart_server()
    async with asyncio.timeout(DEADLINE_S):
        assert not any(await publishing)
        await following
    assert followed == expected
    assert [d.event async for d in bus.follow([StepCompleted], stop_at_end=True)] == expected


@check
async def telemetry_is_lost_with_the_server_and_goes_on(world: World) -> None:
    bus, reader = await world.bus("a"), await world.bus("b")
    await bus.publish([progress(0)])
    deliveries = reader.follow([MidtrainProgressed])
    assert [d.event for d in await take(deliveries, 1)] == [progress(0)]
    await world.restart_server()
    await bus.publish([progress(5)])
    (delivery,) = await take(deliveries, 1)
    assert delivery.event == progress(5)


@check
async def services_and_work_outlive_the_server(world: World) -> None:
    server, asker = await world.bus("a"), await world.bus("b")
    await server.serve("echo", _echo)
    await server.publish([task(n) for n in range(6)])
    items = asker.consume("workers", [StartRollout], num_pending_max=2, ack_wait_s=2.0)
    seen = {item.delivery.event.key() for item in await take(items, 1)}
    await world.restart_server()
    reply = await asker.request("echo", AbortGeneration(request_id="1"), deadline_s=DEADLINE_S)
    assert reply == AbortGeneration(request_id="0")
    async with asyncio.timeout(DEADLINE_S):
        while len(seen) < 6:
            item = await anext(items)
            seen.add(item.delivery.event.key())
            await item.ack()
