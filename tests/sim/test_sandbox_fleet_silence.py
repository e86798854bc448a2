"""A host that falls silent in a burst costs what it held: no other lease runs out meanwhile."""

import asyncio
from typing import Any

from penstock.actors.runtime.clock import VirtualClock, run_virtual
from penstock.actors.runtime.host import ActorHost
from penstock.actors.scheduler.actor import LEARN_S, SandboxScheduler
from penstock.infra.bus.memory.bus import MemoryBus
from penstock.infra.bus.memory.server import MemoryServer
from penstock.infra.simulate.sandboxes.clients import SETTLE_S, BurstClients
from penstock.infra.simulate.sandboxes.hosts import Hosts
from penstock.infra.simulate.sandboxes.nats import audit
from penstock.infra.simulate.sandboxes.settings import BurstScenario
from penstock.infra.stores.memory import MemoryStore


async def burst(scenario: BurstScenario) -> dict[str, Any]:
    server, store = MemoryServer(seed=0, clock=VirtualClock()), MemoryStore()
    stop, are_served = asyncio.Event(), asyncio.Event()

    def bus(name: str) -> MemoryBus:
        return MemoryBus(server, run_id="scheduler", store=store, name=name)

    scheduler = ActorHost(
        SandboxScheduler(), bus("scheduler"), store, name="scheduler", seed=0, clock=VirtualClock()
    )
    running = asyncio.create_task(scheduler.run(stop))
    hosts_end = asyncio.Event()
    hosts = asyncio.create_task(Hosts(bus("hosts"), scenario).run(are_served.set, hosts_end))
    await asyncio.gather(are_served.wait(), asyncio.sleep(LEARN_S + 1.0))
    clients = BurstClients(bus("clients"), scenario)
    placed = await clients.place()
    await asyncio.sleep(SETTLE_S)
    hosts_end.set()
    stop.set()
    found, held, _ = await asyncio.gather(hosts, clients.hold(stop), running)
    return placed | audit(scenario, held, found)


def test_a_silent_host_holds_up_no_other_hosts_leases():
    scenario = BurstScenario(
        num_machines=1600, num_hosts=40, num_images=20, num_failures=2, num_asked=4
    )
    figures = run_virtual(burst(scenario))
    assert figures["machines"] == 1600
    assert figures["hosts_died"] == 2
    assert 0 < figures["groups_asked_anew"] <= figures["machines_died"] / scenario.group_size
    assert (figures["groups_lost"], figures["groups_twice"]) == (0, 0)
    assert figures["machines_reaped"] == 0
    assert figures["machines_created"] == 1600 + figures["machines_died"]
