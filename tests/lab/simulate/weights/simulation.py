"""A whole scenario on the virtual clock, and its figures."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from tests.lab.simulate.weights.merger import SizedMerger
from tests.lab.simulate.weights.region import QuietBus, Region
from tests.lab.simulate.weights.replica import SizedReplica
from tests.lab.simulate.weights.settings import GB, Scenario
from tests.lab.simulate.weights.sized_store import Site, SizedStore
from tests.lab.simulate.weights.trainer import RankedTrainer
from tests.support.memory_bus.server import Faults, MemoryServer
from tests.support.virtual_clock import VirtualClock, run_virtual

from penstock.actors.relay.core.catalog import NOTHING
from penstock.actors.relay.region.compactor import Compactor
from penstock.actors.runtime.host import ActorHost
from penstock.messages.telemetry import percentile

SETTLE_S_MAX = 4 * 3600.0
"""Time for all replicas to reach one version."""
POLL_S = 1.0
NUM_VERSIONS_KEPT = 8
"""Newest versions kept at the origin in any case."""


def simulate(scenario: Scenario) -> dict[str, Any]:
    """Return a scenario's figures; the same for the same scenario."""
    return run_virtual(WeightsSimulation(scenario).run())


class WeightsSimulation:
    """All sites of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        latency_s = max(region.round_trip_s for region in scenario.regions) / 2
        self._server = MemoryServer(
            seed=scenario.seed, clock=VirtualClock(), faults=Faults(latency_s_max=latency_s)
        )
        self._times_s: defaultdict[str, list[float]] = defaultdict(list)
        """Region -> seconds from a version's weights to each replica that serves it or a newer."""
        self._joins_s: list[float] = []
        self._lags: defaultdict[str, int] = defaultdict(int)
        """Region -> the most versions that a replica was behind the trainer."""

    async def run(self) -> dict[str, Any]:
        """Bring version 0 everywhere, take all steps, let everyone settle; return the figures."""
        scenario = self._scenario
        origin = Site()
        bus = QuietBus(self._server, run_id="simulated", store=SizedStore(origin), name="trainer")
        self._trainer = RankedTrainer(scenario, origin, bus)
        self._regions = [Region(scenario, r, origin, self._server) for r in scenario.regions]
        tasks = [asyncio.create_task(self._compact(origin))]
        for region in self._regions:
            region.start_relay()
            tasks.append(asyncio.create_task(region.follow()))
            tasks += region.add_replicas(scenario.replicas_per_region, self._on_applied)
        await self._trainer.publish(0)
        await self._until_all_at(0)
        tasks.append(asyncio.create_task(self._mishap(tasks)))
        await self._trainer.run()
        await self._until_all_at(scenario.num_steps)
        for task in tasks:
            task.cancel()
        return self._figures()

    async def _compact(self, origin: Site) -> None:
        """Run the origin's compactor, beside its store."""
        store = SizedStore(origin)
        bus = QuietBus(self._server, run_id="simulated", store=store, name="compactor")
        make_builder = partial(SizedMerger, self._scenario)
        compactor = Compactor(NUM_VERSIONS_KEPT, make_builder=make_builder)
        host = ActorHost(compactor, bus, store, name="compactor", seed=0, clock=VirtualClock())
        await host.run(asyncio.Event())

    async def _mishap(self, tasks: list[asyncio.Task[None]]) -> None:
        mishap, step_s = self._scenario.mishap, self._scenario.step_s
        (region,) = [r for r in self._regions if r.settings.name == mishap.region] or [None]
        if region is None:
            return
        region.link.bytes_per_s *= mishap.link_factor
        if mishap.relay_lost_at_step:
            await asyncio.sleep(mishap.relay_lost_at_step * step_s)
            await region.lose_relay(mishap.relay_lost_s)
        if mishap.num_joiners:
            await asyncio.sleep(mishap.join_at_step * step_s)
            tasks += region.add_replicas(mishap.num_joiners, self._on_applied)

    async def _until_all_at(self, version: int) -> None:
        async with asyncio.timeout(SETTLE_S_MAX):
            while any(r.version < version for region in self._regions for r in region.replicas):
                await asyncio.sleep(POLL_S)

    def _on_applied(self, replica: SizedReplica, before: int) -> None:
        now_s = asyncio.get_running_loop().time()
        region = replica.name.rpartition("-")[0]
        if before == NOTHING:
            self._joins_s.append(now_s - replica.began_s)
            return
        began_s = self._trainer.began_s
        for version in range(before + 1, replica.version + 1):
            self._times_s[region].append(now_s - began_s[version])
        behind = len(began_s) - 1 - before
        self._lags[region] = max(self._lags[region], behind)

    def _figures(self) -> dict[str, Any]:
        scenario, uploaded = self._scenario, self._trainer.num_bytes
        every = [time_s for times_s in self._times_s.values() for time_s in times_s]
        first, joiners = (
            self._joins_s[: scenario.num_replicas],
            self._joins_s[scenario.num_replicas :],
        )
        return {
            "versions": scenario.num_steps + 1,
            "replicas": sum(len(region.replicas) for region in self._regions),
            "full_uploads_after_v0": sum(n >= scenario.model_bytes for n in uploaded[1:]),
            "trainer_egress_gb_step": round(sum(uploaded[1:]) / scenario.num_steps / GB, 2),
            "publish_s": _spread(self._trainer.published_s[1:]),
            "first_publish_s": round(self._trainer.published_s[0], 2),
            "manifest_bytes_max": self._trainer.manifest_bytes_max,
            "full_snapshot_gb": round(scenario.model_bytes / GB, 1),
            "first_snapshot_s": _spread(first),
            "time_to_version_s": _spread(every),
            **({"join_s": _spread(joiners)} if joiners else {}),
            "regions": {r.settings.name: self._region_figures(r) for r in self._regions},
        }

    def _region_figures(self, region: Region) -> dict[str, Any]:
        name, uploaded = region.settings.name, sum(self._trainer.num_bytes)
        received = sum(replica.num_bytes for replica in region.replicas)
        return {
            "time_to_version_s": _spread(self._times_s[name]),
            "lag_versions_max": self._lags[name],
            "fetched_of_published": round(region.link.num_bytes / uploaded, 4),
            "fan_out_gb_replica": round(received / len(region.replicas) / GB, 1),
        }


def _spread(values: Sequence[float]) -> dict[str, float]:
    percents = {"p50": 50, "p95": 95, "max": 100}
    return {name: round(percentile(values, at), 2) for name, at in percents.items()}
