"""Measures a service of a given age: `python -m tests.lab age --requests N --json`.

```
 aged log ─▶ nats-server, archived as streams fill
 then each role, in a process of its own: from nothing, and once more from its snapshot
```
Times are from a role's start to caught up. The first start reads archive and streams, and saves
snapshots on its way, as the role does while a service goes on.
"""

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.lab.age.aged_log import AgedLog
from tests.lab.age.roles import ROLES

from penstock.actors.runtime.host import ActorHost
from penstock.infra.bus.archive import reading
from penstock.infra.bus.archive.archiver import Archiver
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.bus.settings import ArchiveSection
from penstock.infra.privacy import lineage
from penstock.infra.stores.directory import DirectoryStore
from penstock.messages.base import Event
from penstock.messages.feedback import FeedbackLeftOut, LiveSampleJoined
from penstock.messages.training import StepCompleted

BATCH = 2000
PER_MINUTE = 4000.0
READ_S_MAX = 3600.0
MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--requests", type=int, default=100_000, help="users' requests (100000)")
    text = "seconds after which no more requests are written (default: 1800)"
    parser.add_argument("--seconds", type=float, default=1800.0, help=text)
    text = "events of a stream above which its older half is archived (200000)"
    parser.add_argument("--events-max", type=int, default=200_000, help=text)
    parser.add_argument("--role", choices=ROLES, default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)


async def run(arguments: argparse.Namespace) -> dict[str, Any] | int:
    """Measure, or, started by itself, be one role."""
    if arguments.role:
        return await _be(arguments)
    # Announcements are looked for often, so that the archive is purged within this measurement.
    reading.LOOK_S, reading.PURGE_AFTER_S = 1.0, 5.0
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(store_dir=Path(folder) / "nats")
        await server.start()
        try:
            return await _measure(arguments, server, Path(folder))
        finally:
            await server.stop()


async def _measure(
    arguments: argparse.Namespace, server: EmbeddedServer, folder: Path
) -> dict[str, Any]:
    store = DirectoryStore(folder / "objects")
    bus = await NatsBus.connect(server.url, run_id="age", store=store, name="writer")
    await bus.provision()
    figures = await _write(bus, store, arguments, server)
    before = await _fates(bus)
    figures["roles"] = {}
    for name in ROLES:
        # The first start saves snapshots on its way, as it does while a service goes on.
        for place in ("from_nothing", "from_snapshot"):
            print(f"{name}: starting {place}", file=sys.stderr, flush=True)
            found = await _finish(await _start(name, server, folder))
            figures["roles"].setdefault(name, {})[place] = found
    after = await _fates(bus)
    figures["false_fates"] = len(after["left_out"] & after["joined"])
    figures["fates_since_restart"] = len(after["left_out"] - before["left_out"])
    figures["lineage_s"] = await _lineage(bus)
    figures["nats_server_mib"] = round(_rss(server.pid) / MIB)
    figures["objects_mib"] = round(_size(folder / "objects") / MIB)
    figures["streams_mib"] = round(_size(folder / "nats") / MIB)
    await bus.close()
    return figures


async def _write(
    bus: NatsBus, store: DirectoryStore, arguments: argparse.Namespace, server: EmbeddedServer
) -> dict[str, Any]:
    """Write the log, and archive it as a launcher does."""
    started, num_events, num_requests = time.monotonic(), 0, 0
    settings = ArchiveSection(events_max=arguments.events_max, age_s_min=0.0)
    archiver = Archiver(bus, store, settings)
    batch: list[Event] = []
    looked_at, most_mib = started, 0
    # About as fast as it is written, so that times in events and in the log agree.
    aged = AgedLog(arguments.requests, per_minute=PER_MINUTE, start_at=time.time())
    for event, _ in aged:
        batch.append(event)
        num_requests += type(event).__name__.startswith("Inference")
        if len(batch) < BATCH:
            continue
        await bus.publish(batch)
        num_events, batch = num_events + len(batch), []
        now = time.monotonic()
        if now - looked_at > 10.0:
            await archiver.look()
            looked_at = time.monotonic()
            most_mib = max(most_mib, round(_rss(server.pid) / MIB))
            text = f"{num_requests} requests, {num_events} events, {now - started:.0f} s"
            print(text, file=sys.stderr, flush=True)
        if now - started > arguments.seconds:
            break
    await bus.publish(batch)
    written_s = time.monotonic() - started
    for _ in range(4):
        await archiver.look()
        await asyncio.sleep(reading.PURGE_AFTER_S + 1.0)
    return {
        "requests": num_requests,
        "events": num_events + len(batch),
        "write_s": round(written_s, 1),
        "nats_server_mib_max": most_mib,
    }


async def _start(name: str, server: EmbeddedServer, folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.lab", "age", "--role", name, "--url", server.url,
        "--folder", str(folder), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def _finish(role: asyncio.subprocess.Process) -> dict[str, Any]:
    async with asyncio.timeout(READ_S_MAX):
        out, _ = await role.communicate()
    return json.loads(out.splitlines()[-1])


async def _be(arguments: argparse.Namespace) -> int:
    """Follow the log until caught up."""
    reading.LOOK_S = 1.0
    store = DirectoryStore(Path(arguments.folder) / "objects")
    bus = await NatsBus.connect(arguments.url, run_id="age", store=store, name=arguments.role)
    newest = await bus.last(StepCompleted)
    step = newest.event.step if newest and isinstance(newest.event, StepCompleted) else 0
    actor = ROLES[arguments.role](bus, step)
    host = ActorHost(actor, bus, store, name=arguments.role, seed=0)
    stop, started = asyncio.Event(), time.monotonic()
    running = asyncio.create_task(host.run(stop))
    async with asyncio.timeout(READ_S_MAX):
        while not host.is_caught_up:
            await asyncio.sleep(0.05)
            if running.done():
                break
    caught_up_s = time.monotonic() - started
    # What a caught-up role concludes late, it concludes within a few ticks.
    await asyncio.sleep(5.0)
    stop.set()
    await running
    await bus.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = {"caught_up_s": round(caught_up_s, 1), "rss_mib_max": round(peak)}
    print(json.dumps(figures), flush=True)
    return 0


async def _fates(bus: NatsBus) -> dict[str, set[str]]:
    left_out: set[str] = set()
    joined: set[str] = set()
    types = (FeedbackLeftOut, LiveSampleJoined)
    async for delivery in bus.follow(types, stop_at_end=True):
        if isinstance(delivery.event, FeedbackLeftOut):
            left_out.add(delivery.event.key())
        elif isinstance(delivery.event, LiveSampleJoined):
            joined.update(delivery.event.feedback_ids)
    return {"left_out": left_out, "joined": joined}


async def _lineage(bus: NatsBus) -> float:
    started = time.monotonic()
    found = await lineage.read(bus)
    found.find("1")
    return round(time.monotonic() - started, 1)


def _rss(pid: int) -> int:
    text = Path(f"/proc/{pid}/statm").read_text()
    return int(text.split()[1]) * resource.getpagesize()


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
