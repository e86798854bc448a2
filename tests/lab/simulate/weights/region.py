"""One region: its store, its relay on the real actor host, its replicas."""

import asyncio
from collections.abc import Sequence
from functools import partial

from tests.lab.regions.shaping import Bandwidth
from tests.lab.simulate.weights.merger import SizedMerger
from tests.lab.simulate.weights.replica import OnApplied, Reach, SizedReplica, Updates
from tests.lab.simulate.weights.settings import GB, GBIT, RegionSettings, Scenario
from tests.lab.simulate.weights.sized_store import Site, SizedStore
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer
from tests.support.virtual_clock import VirtualClock

from penstock.actors.relay.core.catalog import Catalog, Rates
from penstock.actors.relay.region.relay import Relay
from penstock.actors.runtime.host import ActorHost
from penstock.messages.base import Event
from penstock.messages.bus import PublishReceipt
from penstock.messages.telemetry import ActorReported
from penstock.messages.weights import WeightsRelayed


class QuietBus(MemoryBus):
    """A bus without actors' reports: one per second and actor would be most of the traffic."""

    async def publish(self, events: Sequence[Event]) -> list[PublishReceipt]:
        """See `Bus.publish`."""
        kept = [event for event in events if not isinstance(event, ActorReported)]
        return await super().publish(kept) if kept else []


class Region:
    """Everything in one region."""

    def __init__(
        self, scenario: Scenario, settings: RegionSettings, origin: Site, server: MemoryServer
    ) -> None:
        self.settings = settings
        self._scenario = scenario
        self._server = server
        self.link = Bandwidth(settings.link_gbit_s * GBIT)
        self.fan_out = Bandwidth(scenario.fan_out_gbit_s * GBIT)
        self.origin = SizedStore(origin, (self.link,), round_trip_s=settings.round_trip_s)
        self._site = Site()
        self._local = SizedStore(self._site)
        rates = Rates(
            fetch_bytes_s=scenario.replica_gbit_s * GBIT, apply_bytes_s=scenario.decode_gb_s * GB
        )
        self._updates = Updates(Catalog(self._local, rates))
        self.replicas: list[SizedReplica] = []
        self._num_starts = 0
        self._relay: asyncio.Task[None] | None = None

    def start_relay(self) -> None:
        """Start the relay, with nothing but the log and the stores."""
        self._num_starts += 1
        host = ActorHost(
            Relay(
                self.settings.name,
                self._local,
                make_builder=partial(SizedMerger, self._scenario),
            ),
            self._bus(f"relay-{self.settings.name}-{self._num_starts}"),
            self.origin,
            name=f"relay-{self.settings.name}",
            seed=self._scenario.seed,
            clock=VirtualClock(),
            incarnation=str(self._num_starts),
        )
        self._relay = asyncio.create_task(host.run(asyncio.Event()))

    async def lose_relay(self, lost_s: float) -> None:
        """Kill the relay; start another after a time."""
        assert self._relay is not None, "the relay has not been started"
        self._relay.cancel()
        await asyncio.wait([self._relay])
        await asyncio.sleep(lost_s)
        self.start_relay()

    def add_replicas(self, count: int, on_applied: OnApplied) -> list[asyncio.Task[None]]:
        """Start replicas that hold nothing."""
        return [self._add_replica(on_applied) for _ in range(count)]

    def _add_replica(self, on_applied: OnApplied) -> asyncio.Task[None]:
        links = (self.fan_out, Bandwidth(self._scenario.replica_gbit_s * GBIT))
        name = f"{self.settings.name}-{len(self.replicas)}"
        reach = Reach(self._local, links, self._updates)
        replica = SizedReplica(self._scenario, name, reach, on_applied)
        self.replicas.append(replica)
        return asyncio.create_task(replica.run())

    async def follow(self) -> None:
        """Pass the relay's announcements on to the replicas."""
        async for delivery in self._bus(f"region-{self.settings.name}").follow([WeightsRelayed]):
            event = delivery.event
            assert isinstance(event, WeightsRelayed)
            if event.region == self.settings.name:
                await self._updates.announce()

    def _bus(self, name: str) -> QuietBus:
        return QuietBus(self._server, run_id="simulated", store=self.origin, name=name)
