"""What the bus does on this machine: `penstock bench bus`."""

import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.stores.directory import DirectoryStore
from penstock.messages.base import Event, Message
from penstock.messages.rpc import Ack
from penstock.messages.training import CheckpointSaved

BATCH = 500
NUM_BATCHES = 8
NUM_REQUESTS = 500
NUM_SINGLE = 200


async def bench_bus() -> dict[str, Any]:
    """Measure an embedded server with `sync_interval: always`, on a folder of its own.

    Returns rates in events/s and latencies in ms, by payload size in bytes.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        server = EmbeddedServer(store_dir=Path(folder) / "nats")
        await server.start()
        store = DirectoryStore(Path(folder) / "objects")
        bus = await NatsBus.connect(server.url, run_id="bench", store=store, name="bench")
        try:
            await bus.provision()
            return await _measure(bus)
        finally:
            await bus.close()
            await server.stop()


async def _measure(bus: NatsBus) -> dict[str, Any]:
    report: dict[str, Any] = {"sync": "always", "batch": BATCH}
    for size in (200, 4096):
        events = [_event(size * 1_000_000 + n, size) for n in range(BATCH * NUM_BATCHES)]
        report[f"publish_per_s_{size}"] = await _publish_rate(bus, events)
    report["follow_per_s"] = await _follow_rate(bus)
    report["publish_single_ms_p50"] = await _single_ms(bus)
    report["request_ms_p50"] = await _request_ms(bus)
    return report


async def _publish_rate(bus: NatsBus, events: Sequence[Event]) -> float:
    started = time.perf_counter()
    for n in range(0, len(events), BATCH):
        await bus.publish(events[n : n + BATCH])
    return round(len(events) / (time.perf_counter() - started), 1)


async def _follow_rate(bus: NatsBus) -> float:
    started = time.perf_counter()
    count = 0
    async for _ in bus.follow([CheckpointSaved], stop_at_end=True):
        count += 1
    return round(count / (time.perf_counter() - started), 1)


async def _single_ms(bus: NatsBus) -> float:
    times: list[float] = []
    for n in range(NUM_SINGLE):
        started = time.perf_counter()
        await bus.publish([_event(n, 200)])
        times.append(time.perf_counter() - started)
    return round(statistics.median(times) * 1e3, 3)


async def _request_ms(bus: NatsBus) -> float:
    async def answer(_: Message) -> AsyncGenerator[Message, None]:
        yield Ack()

    await bus.serve("bench", answer)
    times: list[float] = []
    for _ in range(NUM_REQUESTS):
        started = time.perf_counter()
        await bus.request("bench", Ack(), deadline_s=10)
        times.append(time.perf_counter() - started)
    return round(statistics.median(times) * 1e3, 3)


def _event(step: int, num_bytes: int) -> CheckpointSaved:
    """Return an event whose payload is `num_bytes` long, give or take a few."""
    padding = "x" * (num_bytes - 70)
    return CheckpointSaved(step=step, object_key=padding, weights_digest="")
