"""Checks of work queues: shared, settled once, redelivered."""

import asyncio
from collections.abc import AsyncIterator

from tests.contract.bus.bus_world import (
    DEADLINE_S,
    Check,
    World,
    is_silent,
    take,
    task,
)

from penstock.messages.base import Stream
from penstock.messages.bus import Bus, WorkItem
from penstock.messages.control import MessageRejected
from penstock.messages.streams import NUM_DELIVERIES_MAX
from penstock.messages.task import StartRollout


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


async def what_a_lost_reader_holds_does_not_hold_up_another(world: World) -> None:
    lost, other = await world.bus("a"), await world.bus("b")
    await lost.publish([task(n) for n in range(4)])
    held = await take(lost.consume("workers", [StartRollout], num_pending_max=2), 2)
    taken = await take(other.consume("workers", [StartRollout], num_pending_max=2), 2)
    assert [i.delivery.event.key() for i in (*held, *taken)] == ["r0", "r1", "r2", "r3"]


async def unsettled_work_comes_again(world: World) -> None:
    bus = await world.bus()
    await bus.publish([task(1)])
    items = bus.consume("workers", [StartRollout], num_pending_max=2, ack_wait_s=0.3)
    first, again = await take(items, 2)
    assert (first.delivery.num_delivered, again.delivery.num_delivered) == (1, 2)
    assert again.delivery.event == task(1)
    for _ in range(NUM_DELIVERIES_MAX // 2):  # A slow process finds copies sent before it settled.
        await again.ack()
        following = asyncio.ensure_future(anext(items))
        await asyncio.wait([following], timeout=0.9)
        if not following.done():
            following.cancel()
            await asyncio.wait([following])
            return
        again = following.result()
    raise AssertionError("settled work comes again and again")


async def progress_holds_redelivery_off(world: World) -> None:
    bus = await world.bus()
    items = bus.consume("workers", [StartRollout], num_pending_max=2, ack_wait_s=0.6)
    now = asyncio.get_running_loop().time
    for number in range(20):
        told_at, is_in_time = now(), True
        await bus.publish([task(number)])
        item = await _next_of(items, number)
        again = asyncio.create_task(_next_of(items, number))
        for _ in range(8):
            await item.in_progress()
            await bus.flush()
            is_in_time = is_in_time and now() - told_at < 0.4
            told_at = now()
            await asyncio.wait([again], timeout=0.1)
        is_held_off = not again.done()
        found = await asyncio.wait_for(again, DEADLINE_S)
        assert found.delivery.num_delivered == 2
        await found.term()
        if is_in_time:
            assert is_held_off
            return
    raise AssertionError("never fast enough to say in time that it is at work")


async def _next_of(items: AsyncIterator[WorkItem], number: int) -> WorkItem:
    async for item in items:
        if item.delivery.event == task(number):
            return item
    raise AssertionError("the queue ended")


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


CHECKS: list[Check] = [
    work_is_shared_and_settled_once,
    at_most_num_pending_max_are_out,
    what_a_lost_reader_holds_does_not_hold_up_another,
    unsettled_work_comes_again,
    progress_holds_redelivery_off,
    refused_work_comes_again_after_its_delay,
    undecodable_work_goes_to_the_dead_letters,
]
