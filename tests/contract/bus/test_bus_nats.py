"""NATS passes `check_bus`, on a real nats-server each time."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import nats
import pytest
from tests.contract.bus.bus_world import progress, take
from tests.contract.bus.check_bus import CHECKS

from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.stores.directory import DirectoryStore
from penstock.messages.base import Message, Stream
from penstock.messages.codec import decode, encode
from penstock.messages.control import ActorStarted, RunFinished
from penstock.messages.errors import DeadlineError
from penstock.messages.generation import AbortGeneration
from penstock.messages.telemetry import MidtrainProgressed


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


class StuckStore(DirectoryStore):
    """Answers nothing while it is stuck."""

    stuck = ""

    async def put(self, key: str, data: bytes | memoryview) -> None:
        await self._wait("put")
        await super().put(key, data)

    async def get(self, key: str) -> bytes:
        await self._wait("get")
        return await super().get(key)

    async def _wait(self, what: str) -> None:
        if what == self.stuck:
            await asyncio.Event().wait()


LARGE = AbortGeneration(request_id="x" * 3_000_000)


async def _same(message: Message) -> AsyncIterator[Message]:
    yield message


async def _large(message: Message) -> AsyncIterator[Message]:
    yield LARGE


async def replies_of(bus: NatsBus, service: str, message: Message, idle_s: float) -> list[Message]:
    return [reply async for reply in bus.stream_request(service, message, idle_s=idle_s)]


@pytest.mark.parametrize("stuck", ["put", "get"])
async def test_a_deadline_covers_what_lies_in_the_store(world, tmp_path, stuck):
    server = await world.bus("a")
    await server.serve("same.x", _same)
    await server.serve("large.x", _large)
    world.store = StuckStore(tmp_path / "objects")
    client = await world.bus("b")
    world.store.stuck = stuck
    service, message = {
        "put": ("same.x", LARGE),
        "get": ("large.x", AbortGeneration(request_id="small")),
    }[stuck]
    with pytest.raises(DeadlineError, match=service):
        await client.request(service, message, deadline_s=0.5)
    with pytest.raises(DeadlineError, match=service):
        await replies_of(client, service, message, 0.5)
    world.store.stuck = ""
    assert await client.request(service, message, deadline_s=20.0) == LARGE
    assert await replies_of(client, service, message, 20.0) == [LARGE]


async def test_a_raw_read_decodes_nothing_and_rejects_nothing(world):
    bus = await world.bus()
    early, late = (RunFinished(reason=word * 300_000, step=1) for word in ("a", "xy"))
    await bus.publish([early])
    await world.inject(Stream.TRAINING, "OfTheFuture.k", b"\x81\xa1a\x01")
    await bus.publish([msgspec.structs.replace(late, reason="done")])  # a duplicate of the key
    await bus.publish([ActorStarted(actor="a", incarnation="late" * 8, pid=1)])
    streams = [Stream.CONTROL, Stream.TRAINING, Stream.DLQ]
    found = [message async for message in bus.read_raw(streams)]
    kinds = [message.subject.split(".")[3] for message in found]
    assert kinds == ["RunFinished", "OfTheFuture", "ActorStarted"]
    assert found[0].data == encode(early) and found[1].data == b"\x81\xa1a\x01"
    assert [message.stored_at for message in found] == sorted(m.stored_at for m in found)
    assert [message async for message in bus.read_raw([Stream.DLQ])] == []


async def test_a_raw_read_goes_through_many_batches_and_one_run_alone(world):
    bus = await world.bus()
    other = await NatsBus.connect(world.server.url, run_id="r2", store=world.store, name="other")
    world.buses.append(other)
    for start in range(0, 100, 10):
        events = [
            ActorStarted(actor=f"a{number}", incarnation="i", pid=number)
            for number in range(start, start + 10)
        ]
        await bus.publish(events)
        await other.publish(events)
    found = [decode(message.data).pid async for message in bus.read_raw([Stream.CONTROL])]
    assert found == list(range(100))


async def test_a_reader_of_a_stream_in_memory_begins_behind_the_place_it_is_given(world):
    bus = await world.bus()
    receipts = await bus.publish([progress(n) for n in range(4)])
    deliveries = bus.follow([MidtrainProgressed], after={Stream.METRICS: receipts[1].sequence})
    assert [one.event for one in await take(deliveries, 2)] == [progress(2), progress(3)]
