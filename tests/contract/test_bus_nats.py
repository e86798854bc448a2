"""NATS passes `check_bus`, on a real nats-server each time."""

import os
import signal
from pathlib import Path

import nats
import pytest
from tests.contract.check_bus import CHECKS

from penstock.infra.bus.nats_bus import NatsBus
from penstock.infra.bus.server import EmbeddedServer
from penstock.infra.stores.directory import DirectoryStore
from penstock.messages.base import Stream


class NatsWorld:
    def __init__(self, folder: Path) -> None:
        self.server = EmbeddedServer(store_dir=folder / "nats")
        self.store = DirectoryStore(folder / "objects")
        self.buses: list[NatsBus] = []

    async def bus(self, name: str = "tester") -> NatsBus:
        bus = await NatsBus.connect(self.server.url, run_id="r1", store=self.store, name=name)
        await bus.provision()
        self.buses.append(bus)
        return bus

    async def inject(self, stream: Stream, suffix: str, data: bytes) -> None:
        client = await nats.connect(self.server.url)
        await client.jetstream().publish(f"ps.r1.{stream}.{suffix}", data)
        await client.close()

    async def restart_server(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)
        await self.server.wait()
        await self.server.start()


@pytest.fixture
async def world(tmp_path):
    world = NatsWorld(tmp_path)
    await world.server.start()
    yield world
    for bus in world.buses:
        await bus.close()
    await world.server.stop()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conforms(check, world):
    await check(world)
