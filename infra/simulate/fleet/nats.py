"""The fleet's scheduler on a real NATS server: how many machines a second it places, and how fast.

Real: server, bus, actor runtime, scheduler. Absent: machines; a group is placed, then released.
"""

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from penstock.actors.runtime.host import ActorHost
from penstock.actors.sandbox.fleet import Fleet
from penstock.actors.sandbox.scheduler import FleetScheduler
from penstock.envs.microvm.lease import percentile
from penstock.envs.remote import FLEET_SERVICE
from penstock.infra.bus.nats_bus import NatsBus
from penstock.infra.bus.server import EmbeddedServer
from penstock.infra.simulate.fleet.settings import FleetScenario
from penstock.infra.stores.directory import DirectoryStore
from penstock.messages.machine import GroupPlaced, PlaceGroup, ReportHost

DEADLINE_S = 60.0
REPORT_PERIOD_S = 1.0
NUM_ASKERS = 64
"""Groups that are asked for at once."""


async def place_over_nats(scenario: FleetScenario) -> dict[str, Any]:
    """Place all groups of a scenario through a server of its own; return rate and latencies."""
    with tempfile.TemporaryDirectory(prefix="penstock-fleet-") as folder:
        server = EmbeddedServer(store_dir=Path(folder) / "nats")
        await server.start()
        store = DirectoryStore(Path(folder) / "objects")
        buses = [
            await NatsBus.connect(server.url, run_id="fleet", store=store, name=name)
            for name in ("fleet", "askers")
        ]
        stop = asyncio.Event()
        try:
            await buses[0].provision()
            host = ActorHost(FleetScheduler(), buses[0], store, name="fleet", seed=scenario.seed)
            running = asyncio.create_task(host.run(stop))
            figures = await _place_all(buses[1], scenario)
            stop.set()
            await running
            return figures
        finally:
            for bus in buses:
                await bus.close()
            await server.stop()


async def _place_all(bus: NatsBus, scenario: FleetScenario) -> dict[str, Any]:
    await _report(bus, scenario)
    reports = asyncio.create_task(_keep_reporting(bus, scenario))
    numbers = iter(range(scenario.num_machines // scenario.group_size))
    latencies: list[float] = []

    async def asker() -> None:
        for number in numbers:
            latencies.append(await _place(bus, scenario, number))

    began = time.perf_counter()
    await asyncio.gather(*(asker() for _ in range(NUM_ASKERS)))
    wall_s = time.perf_counter() - began
    reports.cancel()
    await asyncio.gather(reports, return_exceptions=True)
    latencies.sort()
    return {
        "groups": len(latencies),
        "machines_placed": len(latencies) * scenario.group_size,
        "machines_per_s": round(len(latencies) * scenario.group_size / wall_s),
        "groups_per_s": round(len(latencies) / wall_s),
        "place_ms_p50": round(percentile(latencies, 50) * 1e3, 2),
        "place_ms_p99": round(percentile(latencies, 99) * 1e3, 2),
    }


async def _report(bus: NatsBus, scenario: FleetScenario) -> None:
    for number in range(scenario.num_hosts):
        report = ReportHost(host=f"host-{number}", num_slots=scenario.num_slots, num_live=0)
        await bus.request(FLEET_SERVICE, report, deadline_s=DEADLINE_S)


async def _keep_reporting(bus: NatsBus, scenario: FleetScenario) -> None:
    """Be heard as hosts are: who falls silent gets nothing."""
    while True:
        await asyncio.sleep(REPORT_PERIOD_S)
        await _report(bus, scenario)


async def _place(bus: NatsBus, scenario: FleetScenario, number: int) -> float:
    wanted = PlaceGroup(
        group_id=f"group-{number}",
        holder="run",
        num_machines=scenario.group_size,
        image_digest=f"image-{number % scenario.num_images}",
        lease_s=DEADLINE_S,
    )
    began = time.perf_counter()
    placed = await bus.request(FLEET_SERVICE, wanted, deadline_s=DEADLINE_S)
    assert isinstance(placed, GroupPlaced)
    return time.perf_counter() - began


def place_in_memory(scenario: FleetScenario) -> dict[str, Any]:
    """Place all groups without a bus: what the choice alone costs."""
    fleet = Fleet(random.Random(scenario.seed))
    for number in range(scenario.num_hosts):
        fleet.report(f"host-{number}", num_slots=scenario.num_slots, num_live=0, images=[], now=0.0)
    num_groups = scenario.num_machines // scenario.group_size
    began = time.perf_counter()
    for number in range(num_groups):
        fleet.place(
            f"group-{number}",
            num_machines=scenario.group_size,
            image=f"image-{number % scenario.num_images}",
            holder="run",
            lease_s=DEADLINE_S,
            now=0.0,
        )
    wall_s = time.perf_counter() - began
    return {"groups": num_groups, "groups_per_s": round(num_groups / wall_s)}
