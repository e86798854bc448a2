"""`penstock simulate sandboxes`: a fleet's whole burst of machines, through the real scheduler.

```
 group ──PlaceGroup──▶ FleetScheduler (real, over the in-memory bus) ──▶ host
   └─▶ the host's image pages ──▶ the host's Pool (real) ──▶ machines that boot after a drawn time
```
Time is virtual. Real: scheduler, fleet bookkeeping, bus protocol, actor runtime, pools and leases.
Drawn or assumed (`simulate_fleet_settings.py`): boot times, image sizes and popularity, network.
"""

import asyncio
import itertools
import random
import time
from typing import Any

from penstock.actors.runtime.clock import VirtualClock, run_virtual
from penstock.actors.runtime.host import ActorHost
from penstock.actors.sandbox.scheduler import FleetScheduler
from penstock.envs.microvm.lease import percentile
from penstock.envs.microvm.pool import Pool
from penstock.envs.remote import FLEET_SERVICE
from penstock.envs.sandbox import Capability, IsolationClass
from penstock.infra.bus.memory_bus import MemoryBus
from penstock.infra.bus.memory_server import Faults, MemoryServer
from penstock.infra.simulate.fleet.settings import FleetScenario
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.errors import RemoteCallError
from penstock.messages.machine import GroupPlaced, PlaceGroup, ReportHost
from penstock.messages.rollout import SandboxRecord

DEADLINE_S = 600.0
REPORT_PERIOD_S = 1.0


class SimulatedMachine:
    """What a pool needs of a machine."""

    alive = True

    def __init__(self, info: SandboxRecord) -> None:
        self.info = info

    async def close(self) -> None:
        """End."""


class SimulatedBackend:
    """Boots after a drawn time."""

    name = "simulated"
    isolation_class = IsolationClass.HARDWARE_VM
    capabilities = frozenset({Capability.COLD_BOOT})

    def __init__(self, scenario: FleetScenario, rng: random.Random) -> None:
        self._scenario = scenario
        self._rng = rng

    async def start(self, *, cpu: int | None = None, timeout_s: float = 10.0) -> Any:
        """See `Backend.start`."""
        boot_ms = self._scenario.boot_ms * self._rng.lognormvariate(0.0, self._scenario.boot_sigma)
        await asyncio.sleep(boot_ms / 1000)
        record = SandboxRecord(
            backend=self.name, isolation_class=self.isolation_class,
            kernel_digest="", image_digest="", boot_ms=boot_ms,
        )  # fmt: skip
        return SimulatedMachine(record)


class SimulatedHost:
    """A pool, and the images whose pages it has."""

    def __init__(self, name: str, scenario: FleetScenario, rng: random.Random) -> None:
        self.name = name
        self.pool = Pool(
            SimulatedBackend(scenario, rng),
            size=0,
            live_max=scenario.num_slots,
            boots_at_once=scenario.num_cores,
            monotonic=VirtualClock().monotonic,
        )
        self._fetch_s = scenario.image_touched_mib * 8.389e6 / (scenario.link_gbit_s * 1e9)
        self._link = asyncio.Lock()
        self.images: set[str] = set()

    async def need(self, image: str) -> None:
        """Page an image in, one at a time, unless that was done."""
        async with self._link:
            if image not in self.images:
                await asyncio.sleep(self._fetch_s)
                self.images.add(image)


class Simulation:
    """One fleet and one burst."""

    def __init__(self, scenario: FleetScenario) -> None:
        self._scenario = scenario
        self._rng = random.Random(scenario.seed)
        faults = Faults(latency_s_max=scenario.network_ms_max / 1000)
        self._server = MemoryServer(seed=scenario.seed, clock=VirtualClock(), faults=faults)
        self._store = MemoryStore()
        self._hosts = {
            name: SimulatedHost(name, scenario, self._rng)
            for name in (f"host-{n}" for n in range(scenario.num_hosts))
        }
        self._place_s: list[float] = []
        self._ready_s: list[float] = []
        self._retries = 0

    async def run(self) -> dict[str, Any]:
        """Simulate; return the figures."""
        scenario = self._scenario
        scheduler = ActorHost(
            FleetScheduler(), self._bus("fleet"), self._store, name="fleet", seed=scenario.seed
        )
        stop = asyncio.Event()
        running = asyncio.create_task(scheduler.run(stop))
        bus = self._bus("askers")
        for host in self._hosts.values():
            await host.pool.__aenter__()
        reports = asyncio.create_task(self._report(bus))
        await asyncio.sleep(2 * REPORT_PERIOD_S)
        began_cpu_s, began_s = time.process_time(), VirtualClock().monotonic()
        num_groups = scenario.num_machines // scenario.group_size
        images = self._draw_images(num_groups)
        await asyncio.gather(*(self._group(bus, n, images[n]) for n in range(num_groups)))
        all_live_s = VirtualClock().monotonic() - began_s
        cpu_s = time.process_time() - began_cpu_s
        figures = self._figures(all_live_s, cpu_s)
        reports.cancel()
        stop.set()
        await asyncio.gather(running, reports, return_exceptions=True)
        for host in self._hosts.values():
            await host.pool.close()
        return figures

    def _bus(self, name: str) -> MemoryBus:
        return MemoryBus(self._server, run_id="fleet", store=self._store, name=name)

    def _draw_images(self, num_groups: int) -> list[str]:
        ranks = range(1, self._scenario.num_images + 1)
        weights = list(itertools.accumulate(r**-self._scenario.zipf_exponent for r in ranks))
        return [f"image-{n}" for n in self._rng.choices(ranks, cum_weights=weights, k=num_groups)]

    async def _report(self, bus: MemoryBus) -> None:
        while True:
            for host in self._hosts.values():
                report = ReportHost(
                    host=host.name,
                    num_slots=self._scenario.num_slots,
                    num_live=host.pool.counters().live,
                    image_digests=sorted(host.images),
                )
                await bus.request(FLEET_SERVICE, report, deadline_s=DEADLINE_S)
            await asyncio.sleep(REPORT_PERIOD_S)

    async def _group(self, bus: MemoryBus, number: int, image: str) -> None:
        clock = VirtualClock()
        began_s = clock.monotonic()
        host = self._hosts[await self._place(bus, f"group-{number}", image)]
        self._place_s.append(clock.monotonic() - began_s)
        await host.need(image)

        async def machine(member: int) -> None:
            await host.pool.acquire(DEADLINE_S, lease_id=f"{number}.{member}", timeout_s=DEADLINE_S)
            self._ready_s.append(clock.monotonic() - began_s)

        await asyncio.gather(*(machine(m) for m in range(self._scenario.group_size)))

    async def _place(self, bus: MemoryBus, group_id: str, image: str) -> str:
        wanted = PlaceGroup(
            group_id=group_id,
            holder="run",
            num_machines=self._scenario.group_size,
            image_digest=image,
            lease_s=DEADLINE_S,
        )
        while True:
            try:
                placed = await bus.request(FLEET_SERVICE, wanted, deadline_s=DEADLINE_S)
            except RemoteCallError:
                self._retries += 1
                await asyncio.sleep(0.05)
            else:
                assert isinstance(placed, GroupPlaced)
                return placed.host

    def _figures(self, all_live_s: float, cpu_s: float) -> dict[str, Any]:
        ready, placed = sorted(self._ready_s), sorted(self._place_s)
        loads = [host.pool.counters().live for host in self._hosts.values()]
        fetched_mib = sum(len(h.images) for h in self._hosts.values())
        fetched_mib *= self._scenario.image_touched_mib
        return {
            "machines_live": sum(loads),
            "groups": len(placed),
            "retries": self._retries,
            "all_live_s": round(all_live_s, 3),
            "ready_s_p50": round(percentile(ready, 50), 3),
            "ready_s_p99": round(percentile(ready, 99), 3),
            "place_s_p99": round(percentile(placed, 99), 4),
            "fetched_tb": round(fetched_mib * 1.048576e-6, 4),
            "host_load_max_over_mean": round(max(loads) * len(loads) / sum(loads), 3),
            "cpu_s": round(cpu_s, 2),
        }


def simulate_fleet(scenario: FleetScenario) -> dict[str, Any]:
    """Run one burst on virtual time; two runs of one scenario give the same figures but `cpu_s`."""

    async def simulate() -> dict[str, Any]:
        return await Simulation(scenario).run()

    return run_virtual(simulate())
