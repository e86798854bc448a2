"""A closed connection leaves nothing behind that would keep its process from ending."""

import asyncio
from pathlib import Path

from penstock.infra.bus.link import Link
from penstock.infra.bus.server import EmbeddedServer

NUM_LINKS = 40
"""A single one leaves its task behind about every third time, where nothing sees to it."""


async def test_closing_after_the_server_has_gone_ends_every_reconnection(tmp_path: Path) -> None:
    server = EmbeddedServer(store_dir=tmp_path)
    await server.start()
    links = [await Link.connect(server.url, "test") for _ in range(NUM_LINKS)]
    await server.stop()
    async with asyncio.timeout(60.0):
        for index, link in enumerate(links):
            await asyncio.sleep(0.007 * (index % 5))
            await link.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
