"""A burst of machines at one moment, through the real scheduler, on virtual time.

```
 group ──PlaceGroup──▶ scheduler (real, over the in-memory bus) ──▶ host
   └─▶ the host's image pages ──▶ the host's groups and Pool (real) ──▶ machines that boot in time
```
Real: scheduler, its host registry, bus protocol, actor runtime, groups, pools and leases.
Drawn or assumed (`settings.py`): boot times, image sizes and popularity, network.
"""

import asyncio
import random
import time
from typing import Any

from penstock.actors.runtime.clock import VirtualClock, run_virtual
from penstock.actors.runtime.host import ActorHost
from penstock.actors.scheduler.actor import LEARN_S
from penstock.envs.microvm.pool.lease import percentile
from penstock.envs.remote.client import SCHEDULER_SERVICE
from penstock.infra.bus.memory.bus import MemoryBus
from penstock.infra.bus.memory.server import Faults, MemoryServer
from penstock.infra.simulate.sandboxes.policies import SCHEDULERS
from penstock.infra.simulate.sandboxes.pooled_host import PooledHost, SimulatedMachine
from penstock.infra.simulate.sandboxes.settings import BurstScenario
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.errors import RemoteCallError
from penstock.messages.sandbox import AcquireGroup
from penstock.messages.scheduler import GroupPlaced, PlaceGroup, ReportHost

DEADLINE_S = 600.0
REPORT_PERIOD_S = 1.0


class BurstSimulation:
    """One burst on many hosts.

    Args:
        scenario: What is assumed.
        policy: Who chooses hosts; `round_robin` places machine by machine, as one without groups.

    """

    def __init__(self, scenario: BurstScenario, policy: str) -> None:
        self._scenario = scenario
        self._policy = policy
        self._rng = random.Random(scenario.seed)
        faults = Faults(latency_s_max=scenario.network_ms_max / 1000)
        self._server = MemoryServer(seed=scenario.seed, clock=VirtualClock(), faults=faults)
        self._store = MemoryStore()
        self._hosts = {
            name: PooledHost(name, scenario, self._rng)
            for name in (f"host-{n}" for n in range(scenario.num_hosts))
        }
        self._place_s: list[float] = []
        self._ready_s: list[float] = []
        self._retries = 0

    async def run(self) -> dict[str, Any]:
        """Simulate; return the figures."""
        scenario = self._scenario
        scheduler = ActorHost(
            SCHEDULERS[self._policy](),
            self._bus("scheduler"),
            self._store,
            name="scheduler",
            seed=scenario.seed,
            clock=VirtualClock(),
        )
        stop = asyncio.Event()
        running = asyncio.create_task(scheduler.run(stop))
        bus = self._bus("clients")
        for host in self._hosts.values():
            await host.pool.__aenter__()
        reports = asyncio.create_task(self._report(bus))
        await asyncio.sleep(LEARN_S + REPORT_PERIOD_S)
        began_cpu_s, began_s = time.process_time(), VirtualClock().monotonic()
        await asyncio.gather(*(self._group(bus, *group) for group in self._groups()))
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
        return MemoryBus(self._server, run_id="burst", store=self._store, name=name)

    def _groups(self) -> list[tuple[str, str, int]]:
        """Return id, image and size of what is placed as a unit."""
        images, size = self._scenario.draw_images(), self._scenario.group_size
        if self._policy == "affinity":
            return [(f"{number}", image, size) for number, image in enumerate(images)]
        return [
            (f"{number}.{member}", image, 1)
            for number, image in enumerate(images)
            for member in range(size)
        ]

    async def _report(self, bus: MemoryBus) -> None:
        while True:
            for host in self._hosts.values():
                report = ReportHost(
                    host=host.name,
                    num_slots=self._scenario.num_slots,
                    num_live=host.pool.counters().live,
                    image_digests=sorted(host.images),
                    groups=host.groups.held(),
                )
                await bus.request(SCHEDULER_SERVICE, report, deadline_s=DEADLINE_S)
            await asyncio.sleep(REPORT_PERIOD_S)

    async def _group(self, bus: MemoryBus, group_id: str, image: str, size: int) -> None:
        clock = VirtualClock()
        began_s = clock.monotonic()
        host = self._hosts[await self._place(bus, group_id, image, size)]
        self._place_s.append(clock.monotonic() - began_s)
        await host.need(image)
        lease_ids = [f"{group_id}/{member}" for member in range(size)]
        wanted = AcquireGroup(
            group_id=group_id, holder="run", lease_ids=lease_ids, lease_s=DEADLINE_S
        )
        for lease in await host.groups.acquire(wanted, DEADLINE_S, DEADLINE_S):
            assert isinstance(lease.sandbox, SimulatedMachine)
            self._ready_s.append(lease.sandbox.ready_at - began_s)

    async def _place(self, bus: MemoryBus, group_id: str, image: str, size: int) -> str:
        wanted = PlaceGroup(
            group_id=group_id,
            holder="run",
            num_machines=size,
            image_digest=image,
            lease_s=DEADLINE_S,
        )
        while True:
            try:
                placed = await bus.request(SCHEDULER_SERVICE, wanted, deadline_s=DEADLINE_S)
            except RemoteCallError:
                self._retries += 1
                await asyncio.sleep(0.05)
            else:
                assert isinstance(placed, GroupPlaced)
                return placed.host

    def _figures(self, all_live_s: float, cpu_s: float) -> dict[str, Any]:
        ready, placed = sorted(self._ready_s), sorted(self._place_s)
        loads = [host.pool.counters().live for host in self._hosts.values()]
        num_fetched = sum(len(host.images) for host in self._hosts.values())
        return {
            "machines_live": sum(loads),
            "placements": len(placed),
            "retries": self._retries,
            "all_live_s": round(all_live_s, 3),
            "ready_s_p50": round(percentile(ready, 50), 3),
            "ready_s_p95": round(percentile(ready, 95), 3),
            "ready_s_p99": round(percentile(ready, 99), 3),
            "place_s_p99": round(percentile(placed, 99), 4),
            "fetched_tb": self._scenario.terabytes(num_fetched),
            "host_load_max_over_mean": round(max(loads) * len(loads) / sum(loads), 3),
            "cpu_s": round(cpu_s, 2),
        }


def simulate_burst(scenario: BurstScenario, policy: str = "affinity") -> dict[str, Any]:
    """Run one burst on virtual time; two runs of one scenario give the same figures but `cpu_s`."""

    async def simulate() -> dict[str, Any]:
        return await BurstSimulation(scenario, policy).run()

    return run_virtual(simulate())
