"""Checks of closing, and of a server that is killed."""

import asyncio
import contextlib

import pytest
from tests.contract.bus.bus_world import (
    DEADLINE_S,
    Check,
    World,
    echo,
    progress,
    step,
    take,
    task,
)

from penstock.messages.errors import (
    BusClosedError,
)
from penstock.messages.generation import AbortGeneration
from penstock.messages.task import StartRollout
from penstock.messages.telemetry import MidtrainProgressed
from penstock.messages.training import StepCompleted


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


async def telemetry_is_lost_with_the_server_and_goes_on(world: World) -> None:
    bus, reader = await world.bus("a"), await world.bus("b")
    await bus.publish([progress(0)])
    deliveries = reader.follow([MidtrainProgressed])
    assert [d.event for d in await take(deliveries, 1)] == [progress(0)]
    await world.restart_server()
    await bus.publish([progress(5)])
    (delivery,) = await take(deliveries, 1)
    assert delivery.event == progress(5)


async def services_and_work_outlive_the_server(world: World) -> None:
    server, client = await world.bus("a"), await world.bus("b")
    await server.serve("echo", echo)
    await server.publish([task(n) for n in range(6)])
    items = client.consume("workers", [StartRollout], num_pending_max=2, ack_wait_s=2.0)
    seen = {item.delivery.event.key() for item in await take(items, 1)}
    await world.restart_server()
    reply = await client.request("echo", AbortGeneration(request_id="1"), deadline_s=DEADLINE_S)
    assert reply == AbortGeneration(request_id="0")
    async with asyncio.timeout(DEADLINE_S):
        while len(seen) < 6:
            item = await anext(items)
            seen.add(item.delivery.event.key())
            await item.ack()


CHECKS: list[Check] = [
    closing_ends_iterators,
    a_killed_server_loses_and_repeats_nothing,
    telemetry_is_lost_with_the_server_and_goes_on,
    services_and_work_outlive_the_server,
]
