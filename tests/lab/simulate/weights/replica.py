"""An inference replica: goes to the newest version that its region holds, the shortest path."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from tests.lab.regions.shaping import Bandwidth
from tests.lab.simulate.weights.settings import GB, Scenario
from tests.lab.simulate.weights.sized_store import SizedStore
from tests.lab.simulate.weights.transfers import carry

from penstock.actors.relay.core.catalog import NOTHING, Catalog, num_bytes
from penstock.actors.relay.core.leases import leased_path
from penstock.messages.weights import WeightsPublished

OnApplied = Callable[["SizedReplica", int], None]
"""Called with the replica and the version that it served before."""


class UpdatePath(NamedTuple):
    """What to fetch and apply, in order, and how large each is."""

    manifests: list[WeightsPublished]
    sizes: list[int]


class Updates:
    """Wakes a region's replicas when its relay has announced something."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        """Catalog of the region's store, shared by its replicas, as manifests never change."""
        self._event = asyncio.Event()
        self._paths: dict[int, UpdatePath] = {}

    async def announce(self) -> None:
        """Look at the store again and wake everyone."""
        await self.catalog.refresh()
        self._paths.clear()
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self) -> None:
        """Wait for the next announcement."""
        await self._event.wait()

    def path_from(self, version: int) -> UpdatePath:
        """Return the catalog's choice; it is shared by replicas of one version."""
        if version not in self._paths:
            manifests = self.catalog.plan(version)
            self._paths[version] = UpdatePath(
                manifests, [num_bytes(manifest) for manifest in manifests]
            )
        return self._paths[version]


class Reach(NamedTuple):
    """The surroundings of a replica."""

    store: SizedStore
    links: tuple[Bandwidth, ...]
    """Links that an object crosses to it."""
    updates: Updates


class SizedReplica:
    """Fetches, decodes, swaps; an object's bytes pass the store's and the replica's link."""

    def __init__(self, scenario: Scenario, name: str, reach: Reach, on_applied: OnApplied) -> None:
        self.name = name
        self.version = NOTHING
        self.began_s = asyncio.get_running_loop().time()
        self.num_bytes = 0
        """Bytes fetched so far."""
        self._scenario = scenario
        self._reach = reach
        self._on_applied = on_applied

    async def run(self) -> None:
        """Follow the region for ever."""
        updates = self._reach.updates
        while True:
            path = updates.path_from(self.version)
            if not path.manifests:
                await updates.wait()
                continue
            await self._take(path)

    async def _take(self, path: UpdatePath) -> None:
        scenario, (store, links, _) = self._scenario, self._reach
        now_s = asyncio.get_running_loop().time()
        async with leased_path(store, self.name, path.manifests, now_s):
            for size in path.sizes:
                await carry(links, size)
                self.num_bytes += size
                await asyncio.sleep(scenario.model_bytes / (scenario.decode_gb_s * GB))
        await asyncio.sleep(scenario.swap_s)
        before, self.version = self.version, path.manifests[-1].policy_version
        self._on_applied(self, before)
