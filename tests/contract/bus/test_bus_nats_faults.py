"""What only a real server and a real network do: lost acks, refused credentials, many kills."""

import asyncio
import contextlib
import os
import random
import signal

import pytest
from tests.contract.bus.bus_world import saved, step, task
from tests.contract.bus.plain_server import plain_server
from tests.contract.bus.test_bus_nats import NatsWorld

from penstock.infra.bus.jetstream import puller
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.errors import BusError
from penstock.messages.task import StartRollout
from penstock.messages.training import CheckpointSaved, StepCompleted

DEADLINE_S = 60.0


class Proxy:
    """A TCP relay that can swallow the server's answers, and cut every connection."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.swallows = False
        self.holds_s = 0.0
        """How long it holds back what the next client says."""
        self.writers: list[asyncio.StreamWriter] = []

    async def start(self) -> int:
        self.listener = await asyncio.start_server(self.relay, "127.0.0.1", 0)
        return self.listener.sockets[0].getsockname()[1]

    async def relay(self, reader, writer) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers += [writer, server_writer]
        await asyncio.gather(
            self.pump(reader, server_writer, answers=False),
            self.pump(server_reader, writer, answers=True),
        )

    async def pump(self, reader, writer, *, answers: bool) -> None:
        if not answers:
            holds_s, self.holds_s = self.holds_s, 0.0
            await asyncio.sleep(holds_s)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if not (answers and self.swallows):
                    writer.write(data)
        writer.close()

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()


@pytest.fixture
async def world(tmp_path):
    world = NatsWorld(tmp_path)
    await world.server.start()
    yield world
    for bus in world.buses:
        await bus.close()
    await world.server.stop()


@pytest.fixture
async def proxied(world):
    proxy = Proxy(int(world.server.url.rsplit(":", 1)[1]))
    port = await proxy.start()
    url = world.server.url.rsplit(":", 1)[0] + f":{port}"
    bus = await NatsBus.connect(url, run_id="r1", store=world.store, name="proxied")
    yield proxy, bus
    await bus.close()
    proxy.listener.close()
    proxy.cut()


@pytest.mark.parametrize("events", [[step(1)], [step(1), step(2), step(3)], [task(1)]])
async def test_after_a_lost_ack_the_first_copy_counts_as_ours(world, proxied, events):
    proxy, bus = proxied
    direct = await world.bus()
    await bus.publish([saved(1)])
    proxy.swallows = True
    publishing = asyncio.create_task(bus.publish(events))
    async with asyncio.timeout(DEADLINE_S):
        while await direct.last(type(events[0])) is None:
            await asyncio.sleep(0.01)
    proxy.swallows = False
    proxy.cut()
    receipts = await asyncio.wait_for(publishing, DEADLINE_S)
    assert [(r.is_duplicate, r.sequence > 0) for r in receipts] == [(False, True)] * len(events)
    again = await bus.publish(events)
    assert all(receipt.is_duplicate for receipt in again)


async def test_a_request_is_asked_again_after_a_cut(world, proxied):
    proxy, bus = proxied
    server = await world.bus()
    asked = []
    was_cut = asyncio.Event()

    async def answer(message):
        asked.append(message)
        await was_cut.wait()
        yield message

    await server.serve("slow", answer)
    request = asyncio.create_task(bus.request("slow", saved(1), deadline_s=DEADLINE_S))
    async with asyncio.timeout(DEADLINE_S):
        while not asked:
            await asyncio.sleep(0.01)
    proxy.cut()
    was_cut.set()
    assert await request == saved(1)
    assert len(asked) == 2


async def test_a_stream_that_was_cut_raises_and_has_no_hole(world, proxied):
    proxy, bus = proxied
    server = await world.bus()

    async def answer(message):
        for n in range(100):
            yield saved(n)
            await asyncio.sleep(0.01)

    await server.serve("count", answer)
    seen = []
    with pytest.raises(BusError, match="count"):
        async for reply in bus.stream_request("count", saved(0), idle_s=DEADLINE_S):
            seen.append(reply.step)
            if len(seen) == 5:
                proxy.cut()
    assert seen == list(range(len(seen)))


async def test_a_stalled_pull_is_made_again(world, proxied, monkeypatch):
    monkeypatch.setattr(puller, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(puller, "STALL_S", 0.6)
    proxy, bus = proxied
    direct = await world.bus()
    deliveries = bus.follow([StepCompleted])
    await direct.publish([step(1)])
    assert (await asyncio.wait_for(anext(deliveries), DEADLINE_S)).event == step(1)
    proxy.swallows = True
    await direct.publish([step(2)])
    await asyncio.sleep(1.0)
    proxy.swallows = False
    assert (await asyncio.wait_for(anext(deliveries), DEADLINE_S)).event == step(2)
    await deliveries.aclose()


async def test_a_wrong_token_is_refused_at_once(world):
    url = "nats://wrong@" + world.server.url.rsplit("@", 1)[1]
    with pytest.raises(BusError, match=r"127\.0\.0\.1") as caught:
        await NatsBus.connect(url, run_id="r1", store=world.store, name="x")
    assert "wrong@" not in str(caught.value)


async def test_a_process_that_was_too_slow_to_show_its_token_shows_it_again(tmp_path):
    with plain_server(tmp_path, 'authorization { token: "t", timeout: 0.5 }') as port:
        proxy = Proxy(port)
        proxy.holds_s = 1.5
        url = f"nats://t@127.0.0.1:{await proxy.start()}"
        bus = await NatsBus.connect(url, run_id="r1", store=MemoryStore(), name="slow")
        await bus.flush()
        assert len(proxy.writers) >= 4, "two connections"
        await bus.close()
        proxy.listener.close()
        proxy.cut()


async def test_a_full_stream_refuses_and_forgets_nothing(world):
    bus = await world.bus()
    await bus.publish([step(1)])
    full = {"name": "PS_TRAINING", "subjects": ["ps.*.training.>"], "max_bytes": 2000,
            "discard": "new", "allow_direct": True, "allow_atomic": True,
            "duplicate_window": 600_000_000_000}  # fmt: skip
    await bus._connection.api("STREAM.UPDATE.PS_TRAINING", full)
    with pytest.raises(BusError, match="maximum bytes"):
        await bus.publish([saved(n) for n in range(100)])
    assert [d.event async for d in bus.follow([StepCompleted], stop_at_end=True)] == [step(1)]


async def run_through_kills(world: NatsWorld, num_kills: int, num_batches: int) -> None:
    """Publish, work and read while the server dies again and again."""
    rng = random.Random(num_kills)
    buses = [await world.bus(f"b{n}") for n in range(3)]
    expected = [[step(100 * b + n) for n in range(b % 5 + 1)] for b in range(num_batches)]
    everything = [event for batch in expected for event in batch]
    effects, followed = [], []
    killing_done = asyncio.Event()

    async def publish() -> None:
        for b, batch in enumerate(expected):
            receipts = await buses[0].publish([task(b), *batch])
            assert not any(receipt.is_duplicate for receipt in receipts)
            if not killing_done.is_set():
                await asyncio.sleep(0.02)

    async def work() -> None:
        items = buses[1].consume("workers", [StartRollout], num_pending_max=8, ack_wait_s=2.0)
        async for item in items:
            number = int(item.delivery.event.rollout_id[1:])
            (receipt,) = await buses[1].publish([saved(number)])
            effects.extend([number] * (not receipt.is_duplicate))
            await item.ack()

    async def follow() -> None:
        async for delivery in buses[2].follow([StepCompleted]):
            followed.append(delivery.event)

    background = [asyncio.create_task(c) for c in (work(), follow())]
    publishing = asyncio.create_task(publish())
    for _ in range(num_kills):
        await asyncio.sleep(rng.uniform(0.02, 0.3))
        os.kill(world.server.pid, signal.SIGKILL)
        await world.server.wait()
        await world.server.start()
    killing_done.set()
    await publishing
    while len(effects) < num_batches or len(followed) < len(everything):
        await asyncio.sleep(0.05)
        assert not any(t.done() for t in background), [
            t.exception() for t in background if t.done()
        ]
    assert followed == everything
    assert sorted(effects) == list(range(num_batches))
    stored = [d.event.step async for d in buses[0].follow([CheckpointSaved], stop_at_end=True)]
    assert sorted(stored) == list(range(num_batches))
    for task_ in background:
        task_.cancel()
    await asyncio.gather(*background, return_exceptions=True)


async def test_five_kills_lose_and_repeat_no_effect(world):
    async with asyncio.timeout(150):
        await run_through_kills(world, num_kills=5, num_batches=40)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_two_hundred_kills_lose_and_repeat_no_effect(world):
    async with asyncio.timeout(850):
        await run_through_kills(world, num_kills=200, num_batches=2000)
