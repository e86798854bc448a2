"""Checks of requests and their replies."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from tests.contract.bus.bus_world import (
    DEADLINE_S,
    Check,
    World,
    echo,
    take,
)

from penstock.messages.base import Message
from penstock.messages.errors import (
    BusError,
    DeadlineError,
    NotFoundError,
    QueueFullError,
    RemoteCallError,
)
from penstock.messages.generation import AbortGeneration
from penstock.messages.rpc import Ack


async def a_request_gets_the_first_reply(world: World) -> None:
    server, client = await world.bus("a"), await world.bus("b")
    stop = await server.serve("echo.x", echo)
    reply = await client.request("echo.x", AbortGeneration(request_id="3"), deadline_s=DEADLINE_S)
    assert reply == AbortGeneration(request_id="0")
    await stop()
    with pytest.raises(DeadlineError, match=r"echo\.x"):
        await client.request("echo.x", AbortGeneration(request_id="3"), deadline_s=0.3)


async def a_request_waits_for_its_server(world: World) -> None:
    server, client = await world.bus("a"), await world.bus("b")
    asked = asyncio.create_task(
        client.request("echo.x", AbortGeneration(request_id="1"), deadline_s=DEADLINE_S)
    )
    await asyncio.sleep(0.2)
    await server.serve("echo.x", echo)
    assert await asked == AbortGeneration(request_id="0")


async def a_request_that_is_served_fails_at_once_where_it_is_not(world: World) -> None:
    bus = await world.bus()
    replies = bus.stream_request("absent", Ack(), idle_s=1e6, is_served=True)
    with pytest.raises(BusError, match="absent: nobody serves it"):
        await asyncio.wait_for(anext(replies), DEADLINE_S)


async def replies_stream_in_order_to_their_end(world: World) -> None:
    server, client = await world.bus("a"), await world.bus("b")
    await server.serve("echo", echo)

    async def ask(num: int) -> list[str]:
        request = AbortGeneration(request_id=str(num))
        replies = client.stream_request("echo", request, idle_s=DEADLINE_S)
        return [reply.request_id async for reply in replies]

    answers = await asyncio.gather(*(ask(num) for num in (0, 1, 5, 200)))
    assert answers == [[str(n) for n in range(num)] for num in (0, 1, 5, 200)]


async def an_idle_stream_meets_its_deadline(world: World) -> None:
    bus = await world.bus()

    async def stalls(message: Message) -> AsyncIterator[Message]:
        yield Ack()
        await asyncio.sleep(DEADLINE_S)

    stop = await bus.serve("stalls", stalls)
    replies = bus.stream_request("stalls", Ack(), idle_s=3.0)
    assert await take(replies, 1) == [Ack()]
    with pytest.raises(DeadlineError, match="stalls"):
        await anext(replies)
    await stop()


async def errors_of_a_server_are_typed_at_the_client(world: World) -> None:
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


CHECKS: list[Check] = [
    a_request_gets_the_first_reply,
    a_request_waits_for_its_server,
    a_request_that_is_served_fails_at_once_where_it_is_not,
    replies_stream_in_order_to_their_end,
    an_idle_stream_meets_its_deadline,
    errors_of_a_server_are_typed_at_the_client,
    one_of_many_servers_answers,
]
