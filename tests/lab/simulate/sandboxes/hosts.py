"""All simulated hosts in one process, each on its own subject of a real server.

Each reports once a second and reaps its own leases. Some die meanwhile: they no longer answer or
report, and what they held is lost.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from tests.lab.simulate.sandboxes.host import SimulatedHost
from tests.lab.simulate.sandboxes.settings import BurstScenario

from penstock.envs.sandbox_client.client import (
    SCHEDULER_SERVICE,
    SandboxBusyError,
    host_service,
    to_remote_error,
)
from penstock.messages.base import Message
from penstock.messages.bus import Bus
from penstock.messages.errors import DeadlineError
from penstock.messages.requests.scheduler import ReleaseGroup
from penstock.messages.rpc import Ack
from penstock.messages.sandbox import AcquireGroup, GroupLeased, GroupsRenewed, RenewGroups

REPORT_PERIOD_S = 1.0
REPORT_DEADLINE_S = 5.0


class Hosts:
    """Serves every host."""

    def __init__(self, bus: Bus, scenario: BurstScenario) -> None:
        self._bus = bus
        self._scenario = scenario
        self._images = scenario.draw_images()
        self._hosts = {
            name: SimulatedHost(name, scenario)
            for name in (f"h{number}" for number in range(scenario.num_hosts))
        }
        self._stops: dict[str, Callable[[], Awaitable[None]]] = {}
        self._reports: dict[str, asyncio.Task[None]] = {}
        self._dead: list[SimulatedHost] = []
        self._num_requests = 0
        self._deaths: set[asyncio.Task[None]] = set()

    async def run(self, is_ready: Callable[[], None], stop: asyncio.Event) -> dict[str, Any]:
        """Serve until `stop`; return who held what then, and what was done."""
        for host in self._hosts.values():
            service = host_service(host.name)
            self._stops[host.name] = await self._bus.serve(service, partial(self._answer, host))
            self._reports[host.name] = asyncio.create_task(self._report(host))
        is_ready()
        await stop.wait()
        for task in self._reports.values():
            task.cancel()
        await asyncio.gather(*self._reports.values(), return_exceptions=True)
        return self._figures()

    async def _answer(self, host: SimulatedHost, message: Message) -> AsyncIterator[Message]:
        now = asyncio.get_running_loop().time()
        match message:
            case AcquireGroup():
                yield await self._acquire(host, message, now)
            case RenewGroups():
                yield GroupsRenewed(gone=host.renew(message.group_ids, now))
            case ReleaseGroup():
                host.release(message.group_id)
                yield Ack()
            case _:
                raise AssertionError(type(message).__name__)

    async def _acquire(self, host: SimulatedHost, request: AcquireGroup, now: float) -> Message:
        self._fail_in_time()
        held = host.acquire(request, self._images[int(request.group_id)], now)
        if held is None:
            return to_remote_error(SandboxBusyError(f"{host.name}: no room"))
        await asyncio.sleep(held.ready_at - now)
        return GroupLeased(group_id=request.group_id, host=host.name, sandboxes=held.records)

    def _fail_in_time(self) -> None:
        """Let hosts die one after the other, spread over the burst, the fullest of them first."""
        scenario, num_dead = self._scenario, len(self._dead)
        self._num_requests += 1
        fails_after = scenario.num_groups * (num_dead + 1) // (scenario.num_failures + 1)
        if num_dead < scenario.num_failures and self._num_requests >= fails_after:
            name = max(self._hosts, key=lambda n: self._hosts[n].num_live)
            self._dead.append(self._hosts.pop(name))
            self._reports.pop(name).cancel()
            death = asyncio.create_task(_end(self._stops.pop(name)))
            self._deaths.add(death)

    async def _report(self, host: SimulatedHost) -> None:
        loop = asyncio.get_running_loop()
        offset = int(host.name[1:]) / self._scenario.num_hosts
        await asyncio.sleep(offset * REPORT_PERIOD_S)
        while True:
            host.reap(loop.time())
            try:
                await self._bus.request(
                    SCHEDULER_SERVICE, host.report(), deadline_s=REPORT_DEADLINE_S
                )
            except DeadlineError:
                continue
            await asyncio.sleep(REPORT_PERIOD_S)

    def _figures(self) -> dict[str, Any]:
        living, all_hosts = self._hosts.values(), [*self._hosts.values(), *self._dead]
        loads = [host.num_live for host in living]
        return {
            "groups": {host.name: list(host.groups) for host in living},
            "dead": [host.name for host in self._dead],
            "live": sum(loads),
            "lost": sum(host.num_live for host in self._dead),
            "created": sum(host.num_created for host in all_hosts),
            "expired": sum(host.num_expired for host in all_hosts),
            "fetched": sum(len(host.images) for host in all_hosts),
            "load_max_over_mean": round(max(loads) * len(loads) / max(1, sum(loads)), 3),
        }


async def _end(stop: Callable[[], Awaitable[None]]) -> None:
    await stop()
