"""Whoever wants groups of machines: asks by the real client, renews, asks anew for what is lost.

```
 num_asked at once: acquire_group ──▶ scheduler, host ──▶ held, with its host
 every lease_s / 3: renew_groups, one message a host ──▶ gone, or no answer: acquire_group again
```
"""

import asyncio
import time
from collections import defaultdict
from typing import Any

from penstock.envs.microvm.lease import percentile
from penstock.envs.remote import GroupTerms, LeaseTerms
from penstock.envs.remote_group import acquire_group, renew_groups
from penstock.envs.sandbox import SandboxTimeout
from penstock.infra.bus.nats_bus import NatsBus
from penstock.infra.simulate.fleet.settings import FleetScenario
from penstock.messages.base import Message

TERMS = LeaseTerms(
    holder="burst", lease_s=6.0, acquire_wait_s=60.0, margin_s=2.0, retry_delay_s=0.05
)
SETTLE_S = 2 * TERMS.lease_s
"""After the burst: losses are noticed and made up for, and what nobody renews is reaped."""


class BusAsker:
    """An `Asker` on a bus, outside any actor."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus

    async def request(
        self, service: str, message: Message, *, deadline_s: float, reason: str = ""
    ) -> Message:
        """See `Asker.request`."""
        return await self._bus.request(service, message, deadline_s=deadline_s)

    async def sleep(self, duration_s: float) -> None:
        """See `Asker.sleep`."""
        await asyncio.sleep(duration_s)

    def monotonic(self) -> float:
        """See `Asker.monotonic`."""
        return time.perf_counter()


class Askers:
    """Asks for all groups of a scenario and holds them."""

    def __init__(self, bus: NatsBus, scenario: FleetScenario) -> None:
        self._asker = BusAsker(bus)
        self._scenario = scenario
        self._images = scenario.draw_images()
        self._ready_s: list[float] = []
        self._num_asked_anew = 0
        self._host_of: dict[str, str] = {}
        """Group -> the host that it was leased on last."""

    async def place(self) -> dict[str, Any]:
        """Lease every group once, `num_asked` at a time; return rate and latencies."""
        self._holding = asyncio.create_task(self._hold())
        numbers = iter(range(self._scenario.num_groups))

        async def one_after_the_other() -> None:
            for number in numbers:
                began_s = time.perf_counter()
                await self._acquire(str(number))
                self._ready_s.append(time.perf_counter() - began_s)

        began_s = time.perf_counter()
        await asyncio.gather(*(one_after_the_other() for _ in range(self._scenario.num_asked)))
        return self._figures(time.perf_counter() - began_s)

    async def hold(self, stop: asyncio.Event) -> dict[str, Any]:
        """Make up for losses until `stop`; return where all groups are then."""
        await stop.wait()
        self._holding.cancel()
        await asyncio.gather(self._holding, return_exceptions=True)
        return {"host_of": self._host_of, "asked_anew": self._num_asked_anew}

    async def _acquire(self, group_id: str) -> None:
        size = self._scenario.group_size
        group = GroupTerms(
            group_id=group_id, num_machines=size, image_digest=self._images[int(group_id)]
        )
        lease_ids = [f"{group_id}.{member}" for member in range(size)]
        leased = await acquire_group(self._asker, group, lease_ids, TERMS)
        assert len(leased.sandboxes) == size
        self._host_of[group_id] = leased.host

    async def _hold(self) -> None:
        while True:
            await asyncio.sleep(TERMS.lease_s / 3)
            held: defaultdict[str, list[str]] = defaultdict(list)
            for group_id, host in self._host_of.items():
                held[host].append(group_id)
            await asyncio.gather(*(self._renew(host, groups) for host, groups in held.items()))

    async def _renew(self, host: str, group_ids: list[str]) -> None:
        """Renew what is held on a host; ask anew for what is gone."""
        try:
            gone = await renew_groups(self._asker, host, group_ids, TERMS)
        except SandboxTimeout:
            gone = group_ids
        self._num_asked_anew += len(gone)
        await asyncio.gather(*(self._acquire(group_id) for group_id in gone))

    def _figures(self, wall_s: float) -> dict[str, Any]:
        ready, num_groups = sorted(self._ready_s), len(self._ready_s)
        return {
            "machines": num_groups * self._scenario.group_size,
            "machines_per_s": round(num_groups * self._scenario.group_size / wall_s),
            "groups_per_s": round(num_groups / wall_s),
            "wall_s": round(wall_s, 2),
            "ready_s_p50": round(percentile(ready, 50), 3),
            "ready_s_p95": round(percentile(ready, 95), 3),
            "ready_s_p99": round(percentile(ready, 99), 3),
        }
