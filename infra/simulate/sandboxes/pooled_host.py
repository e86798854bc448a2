"""A host on virtual time: a real pool and real groups above machines that only take time."""

import asyncio
import random
from typing import Any

from penstock.actors.runtime.clock import VirtualClock
from penstock.actors.sandbox_host.groups import Groups
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.sandbox import Capability, IsolationClass
from penstock.infra.simulate.sandboxes.settings import BurstScenario
from penstock.messages.rollout import SandboxRecord


class SimulatedMachine:
    """What a pool needs of a machine."""

    alive = True

    def __init__(self, info: SandboxRecord) -> None:
        self.info = info
        self.ready_at = VirtualClock().monotonic()

    async def close(self) -> None:
        """End."""


class SimulatedBackend:
    """Boots after a drawn time."""

    name = "simulated"
    isolation_class = IsolationClass.HARDWARE_VM
    capabilities = frozenset({Capability.COLD_BOOT})

    def __init__(self, scenario: BurstScenario, rng: random.Random) -> None:
        self._scenario = scenario
        self._rng = rng

    async def start(self, *, cpu: int | None = None, timeout_s: float = 10.0) -> Any:
        """See `SandboxBackend.start`."""
        boot_ms = self._scenario.boot_ms * self._rng.lognormvariate(0.0, self._scenario.boot_sigma)
        await asyncio.sleep(boot_ms / 1000)
        record = SandboxRecord(
            backend=self.name, isolation_class=self.isolation_class,
            kernel_digest="", image_digest="", boot_ms=boot_ms,
        )  # fmt: skip
        return SimulatedMachine(record)


class PooledHost:
    """A pool, and the images whose pages it has."""

    def __init__(self, name: str, scenario: BurstScenario, rng: random.Random) -> None:
        self.name = name
        self.pool = Pool(
            SimulatedBackend(scenario, rng),
            size=0,
            live_max=scenario.num_slots,
            boots_at_once=scenario.num_cores,
            monotonic=VirtualClock().monotonic,
        )
        self.groups = Groups(self.pool)
        self._fetch_s = scenario.fetch_s
        self._link = asyncio.Lock()
        self.images: set[str] = set()

    async def need(self, image: str) -> None:
        """Page an image in, one at a time, unless that was done."""
        async with self._link:
            if image not in self.images:
                await asyncio.sleep(self._fetch_s)
                self.images.add(image)
