"""A closed connection leaves nothing behind that would keep its process from ending."""

import asyncio
from pathlib import Path

from penstock.infra.bus.jetstream.connection import NatsConnection
from penstock.infra.bus.server.server import EmbeddedServer

NUM_LINKS = 60
"""About every third one leaves its task behind, where nothing sees to it."""
SPREAD_S = 1.5


async def test_closing_after_the_server_has_gone_ends_every_reconnection(tmp_path: Path) -> None:
    server = EmbeddedServer(store_dir=tmp_path)
    await server.start()
    links = [await NatsConnection.connect(server.url, "test") for _ in range(NUM_LINKS)]
    await server.stop()

    async def close(index: int) -> None:
        await asyncio.sleep(SPREAD_S * (1 + index / NUM_LINKS) / 2)
        await links[index].close()

    async with asyncio.timeout(60.0):
        await asyncio.gather(*(close(index) for index in range(NUM_LINKS)))
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_reconnection_that_misses_cancellations_is_canceled_again(tmp_path: Path) -> None:
    server = EmbeddedServer(store_dir=tmp_path)
    await server.start()
    connection = await NatsConnection.connect(server.url, "test")
    num_missed = 0

    async def reconnect() -> None:
        nonlocal num_missed
        while num_missed < 3:
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                num_missed += 1

    connection._client._reconnection_task = task = asyncio.create_task(reconnect())
    await asyncio.sleep(0)
    await connection.close()
    assert task.done()
    await server.stop()
