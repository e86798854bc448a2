"""What the bus does on this machine: `python -m tests.lab bus`."""

import argparse
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Sequence
from pathlib import Path
from typing import Any

import nats

from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.stores.directory import DirectoryStore
from penstock.infra.stores.jetstream import JetStreamStore
from penstock.messages.base import Event, Message
from penstock.messages.rpc import Ack
from penstock.messages.training import CheckpointSaved

BATCH = 500
NUM_BATCHES = 8
NUM_REQUESTS = 500
NUM_SINGLE = 200
OBJECT_BYTES = 24_000_000
NUM_OBJECTS = 3


async def run(_arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure an embedded server with `sync_interval: always`, on a folder of its own.

    Returns rates in events/s and latencies in ms, by payload size in bytes, and MB/s of objects in
    a bucket, beside those of nats-py's own object store.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        server = EmbeddedServer(store_dir=Path(folder) / "nats")
        await server.start()
        store = DirectoryStore(Path(folder) / "objects")
        bus = await NatsBus.connect(server.url, run_id="bench", store=store, name="bench")
        try:
            await bus.provision()
            return await _measure(bus) | await _object_rates(server.url)
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


async def _object_rates(url: str) -> dict[str, Any]:
    """Measure whole objects: medians of alternating puts and gets, ours and nats-py's."""
    store = await JetStreamStore.connect(url, "bench")
    client = await nats.connect(url)  # pyright: ignore[reportUnknownMemberType]
    peer = await client.jetstream().create_object_store("bench-peer")  # pyright: ignore[reportUnknownMemberType]
    times: dict[str, list[float]] = defaultdict(list)

    async def timed(name: str, work: Awaitable[object]) -> None:
        started = time.perf_counter()
        await work
        times[name].append(time.perf_counter() - started)

    try:
        for n in range(NUM_OBJECTS):
            data = random.Random(n).randbytes(OBJECT_BYTES)
            await timed("object_put_mb_per_s", store.put(str(n), data))
            await timed("nats_py_put_mb_per_s", peer.put(str(n), data))
            await timed("object_get_mb_per_s", store.get(str(n)))
            await timed("nats_py_get_mb_per_s", peer.get(str(n)))
    finally:
        await client.close()
        await store.close()
    return {
        name: round(OBJECT_BYTES / 1e6 / statistics.median(each), 1) for name, each in times.items()
    }


def _event(step: int, num_bytes: int) -> CheckpointSaved:
    """Return an event whose payload is `num_bytes` long, give or take a few."""
    padding = "x" * (num_bytes - 70)
    return CheckpointSaved(step=step, object_key=padding, weights_digest="")
