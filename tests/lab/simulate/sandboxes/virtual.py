"""The burst on virtual time: scheduler, hosts and clients on one in-memory bus, in one loop."""

import asyncio
import time
from typing import Any

import msgspec
from tests.lab.simulate.sandboxes.clients import SETTLE_S, BurstClients, audit
from tests.lab.simulate.sandboxes.hosts import Hosts
from tests.lab.simulate.sandboxes.settings import POLICIES, BurstScenario
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import Faults, MemoryServer
from tests.support.virtual_clock import VirtualClock, run_virtual

from penstock.actors.runtime.host import ActorHost
from penstock.actors.scheduler.actor import LEARN_S, SandboxScheduler
from penstock.infra.stores.memory import MemoryStore


def simulate_burst(scenario: BurstScenario, policy: str = "affinity") -> dict[str, Any]:
    """Request every group at one instant, while no host dies; return the figures.

    Two runs of one scenario give the same figures except `cpu_s`. `round_robin` places machine by
    machine, as a scheduler without groups does.
    """
    by_machine = policy == "round_robin"
    scenario = msgspec.structs.replace(scenario, num_failures=0, is_by_machine=by_machine)
    scenario = msgspec.structs.replace(scenario, num_at_once=scenario.num_groups)
    return run_virtual(place_in_memory(scenario, policy))


async def place_in_memory(scenario: BurstScenario, policy: str) -> dict[str, Any]:
    """Place all groups of a scenario over an in-memory bus; return the figures."""
    clock, store = VirtualClock(), MemoryStore()
    faults = Faults(latency_s_max=scenario.network_ms_max / 1000)
    server = MemoryServer(seed=scenario.seed, clock=clock, faults=faults)

    def bus(name: str) -> MemoryBus:
        return MemoryBus(server, run_id="burst", store=store, name=name)

    actor = SandboxScheduler(registry_type=POLICIES[policy])
    scheduler = ActorHost(
        actor, bus("scheduler"), store, name="scheduler", seed=scenario.seed, clock=clock
    )
    stop, are_served = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(scheduler.run(stop))
    hosts = asyncio.create_task(Hosts(bus("hosts"), scenario).run(are_served.set, stop))
    await asyncio.gather(are_served.wait(), asyncio.sleep(LEARN_S + 1.0))
    began_cpu_s = time.process_time()
    clients = BurstClients(bus("clients"), scenario, clock)
    figures = await clients.place()
    cpu_s = round(time.process_time() - began_cpu_s, 2)
    await asyncio.sleep(SETTLE_S)
    stop.set()
    on_hosts, held, _ = await asyncio.gather(hosts, clients.hold(stop), running)
    return figures | audit(scenario, held, on_hosts) | {"cpu_s": cpu_s}
