"""Clients of a burst: they lease by the real client, renew, and request again what is lost.

```
 num_at_once: acquire_group ──▶ scheduler, host ──▶ held, with its host
 for each host, every lease_s / 3: renew_groups, one message ──▶ gone: acquire_group again
                                    no answer for a whole lease ──▶ all of it again
```
Each host is renewed separately: one that does not answer delays no other's leases.
`audit` compares what clients hold with what hosts hold.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
from tests.lab.simulate.sandboxes.settings import BurstScenario

from penstock.actors.runtime.clock import Clock
from penstock.envs.sandbox_client.client import GroupSpec, LeaseSpec, keep_renewed
from penstock.envs.sandbox_client.group import acquire_group, renew_groups
from penstock.messages.base import Message
from penstock.messages.bus import Bus
from penstock.messages.errors import RemoteCallError
from penstock.messages.telemetry import percentile

SPEC = LeaseSpec(holder="burst", lease_s=6.0, acquire_wait_s=60.0, margin_s=2.0, retry_delay_s=0.05)
SETTLE_S = 2 * SPEC.lease_s
"""After the burst: losses are noticed and replaced, and what nobody renews is reaped."""


class BusClient:
    """A `SandboxClient` on a bus, outside any actor."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self.num_refused = 0

    async def request(
        self, service: str, message: Message, *, deadline_s: float, reason: str = ""
    ) -> Message:
        """See `SandboxClient.request`."""
        try:
            return await self._bus.request(service, message, deadline_s=deadline_s)
        except RemoteCallError:
            self.num_refused += 1
            raise

    async def sleep(self, duration_s: float) -> None:
        """See `SandboxClient.sleep`."""
        await asyncio.sleep(duration_s)

    def monotonic(self) -> float:
        """See `SandboxClient.monotonic`."""
        return self._clock.monotonic()


class BurstClients:
    """Leases all groups of a scenario and holds them."""

    def __init__(self, bus: Bus, scenario: BurstScenario, clock: Clock) -> None:
        self._client = BusClient(bus, clock)
        self._scenario = scenario
        self._images = scenario.draw_images()
        self._ready_s: list[float] = []
        self._num_requested_again = 0
        self._held: defaultdict[str, set[str]] = defaultdict(set)
        """Host -> the groups that are leased there."""
        self._renewals: dict[str, asyncio.Task[None]] = {}
        """Task that renews, by host that groups are leased on."""
        self._repeats: set[asyncio.Task[None]] = set()

    async def place(self) -> dict[str, Any]:
        """Lease every group once, `num_at_once` at a time; return rate and latencies."""
        numbers = iter(range(self._scenario.num_groups))

        async def lease_next() -> None:
            for number in numbers:
                began_s = self._client.monotonic()
                await self._acquire(str(number))
                self._ready_s.append(self._client.monotonic() - began_s)

        began_s = self._client.monotonic()
        await asyncio.gather(*(lease_next() for _ in range(self._scenario.num_at_once)))
        return self._figures(self._client.monotonic() - began_s)

    async def hold(self, stop: asyncio.Event) -> dict[str, Any]:
        """Replace losses until `stop`; return where all groups are then."""
        await stop.wait()
        tasks = [*self._renewals.values(), *self._repeats]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        host_of = {group_id: host for host, held in self._held.items() for group_id in held}
        return {"host_of": host_of, "requested_again": self._num_requested_again}

    async def _acquire(self, group_id: str) -> None:
        size = self._scenario.placed_size
        group = GroupSpec(group_id=group_id, num_machines=size)
        spec = msgspec.structs.replace(SPEC, image_digest=self._images[int(group_id)])
        lease_ids = [f"{group_id}.{member}" for member in range(size)]
        leased = await acquire_group(self._client, group, lease_ids, spec)
        assert len(leased.sandboxes) == size
        self._held[leased.host].add(group_id)
        if leased.host not in self._renewals:
            self._renewals[leased.host] = asyncio.create_task(self._keep(leased.host))

    async def _keep(self, host: str) -> None:
        """Renew what is held on a host until it stops answering; request again what is gone."""
        held = self._held[host]

        async def renew(deadline_s: float) -> None:
            spec = msgspec.structs.replace(SPEC, margin_s=deadline_s)
            self._request_again(held, await renew_groups(self._client, host, list(held), spec))

        await keep_renewed(self._client, renew, SPEC)
        del self._renewals[host]
        self._request_again(held, list(held))

    def _request_again(self, held: set[str], gone: Iterable[str]) -> None:
        for group_id in gone:
            held.discard(group_id)
            self._num_requested_again += 1
            repeat = asyncio.create_task(self._acquire(group_id))
            self._repeats.add(repeat)
            repeat.add_done_callback(self._repeats.discard)

    def _figures(self, wall_s: float) -> dict[str, Any]:
        ready, num_groups = self._ready_s, len(self._ready_s)
        return {
            "placements": num_groups,
            "retries": self._client.num_refused,
            "machines": num_groups * self._scenario.placed_size,
            "machines_per_s": round(num_groups * self._scenario.placed_size / wall_s),
            "groups_per_s": round(num_groups / wall_s),
            "all_live_s": round(wall_s, 3),
            "ready_s_p50": round(percentile(ready, 50), 3),
            "ready_s_p95": round(percentile(ready, 95), 3),
            "ready_s_p99": round(percentile(ready, 99), 3),
        }


def audit(
    scenario: BurstScenario, held: dict[str, Any], on_hosts: dict[str, Any]
) -> dict[str, Any]:
    """Return the figures of a burst's end.

    Args:
        scenario: What was simulated.
        held: As `BurstClients.hold` returns it.
        on_hosts: As `Hosts.run` returns it.

    """
    num_hosts_of = Counter(group for groups in on_hosts["groups"].values() for group in groups)
    where = {group: host for host, groups in on_hosts["groups"].items() for group in groups}
    held_on: dict[str, str] = held["host_of"]
    return {
        "machines_live": on_hosts["live"],
        "hosts_died": len(on_hosts["dead"]),
        "machines_died": on_hosts["lost"],
        "groups_requested_again": held["requested_again"],
        "groups_lost": scenario.num_groups - sum(where.get(g) == h for g, h in held_on.items()),
        "groups_twice": sum(count > 1 for count in num_hosts_of.values()),
        "machines_created": on_hosts["created"],
        "machines_reaped": on_hosts["expired"],
        "fetched_tb": scenario.terabytes(on_hosts["fetched"]),
        "host_load_max_over_mean": on_hosts["load_max_over_mean"],
    }
