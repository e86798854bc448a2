"""The burst on a real NATS server: clients, scheduler and hosts are processes of their own.

Real: server, bus, actor runtime, scheduler, the client that leases groups, reports, deaths.
Simulated: hosts lease as real ones do, but their machines only take time, on a link and on cores.
"""

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.lab.simulate.sandboxes.clients import SETTLE_S, BurstClients, audit
from tests.lab.simulate.sandboxes.hosts import Hosts
from tests.lab.simulate.sandboxes.settings import POLICIES, BurstScenario

from penstock.actors.runtime.clock import SystemClock
from penstock.actors.runtime.host import ActorHost
from penstock.actors.scheduler.actor import LEARN_S, SandboxScheduler
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.errors import DeadlineError

START_S_MAX = 60.0
BURST_S_MAX = 600.0
END_S_MAX = 30.0
Work = Callable[[str, BurstScenario, str, "ChildPipe"], Any]


class ChildPipe:
    """The child's end: it reports when it is ready, and learns when to stop."""

    def __init__(self, connection: Connection) -> None:
        self.stop = asyncio.Event()
        self._connection = connection
        asyncio.get_running_loop().add_reader(connection.fileno(), self.stop.set)

    def send(self, value: object) -> None:
        """Send to the parent."""
        self._connection.send(value)


async def schedule(url: str, scenario: BurstScenario, policy: str, line: ChildPipe) -> None:
    """Run the scheduler until the parent says stop."""
    bus = await _connect(url, "scheduler")
    actor = SandboxScheduler(registry_type=POLICIES[policy])
    host = ActorHost(actor, bus, MemoryStore(), name="scheduler", seed=scenario.seed)
    line.send("ready")
    await host.run(line.stop)
    await bus.close()


async def serve_hosts(
    url: str, scenario: BurstScenario, policy: str, line: ChildPipe
) -> dict[str, Any]:
    """Run all hosts until the parent says stop; return what they hold then."""
    bus = await _connect(url, "hosts")
    figures = await Hosts(bus, scenario).run(lambda: line.send("ready"), line.stop)
    await bus.close()
    return figures


async def lease_all(
    url: str, scenario: BurstScenario, policy: str, line: ChildPipe
) -> dict[str, Any]:
    """Place the whole burst and hold it until the parent says stop; return the figures."""
    bus = await _connect(url, "clients")
    line.send("ready")
    clients = BurstClients(bus, scenario, SystemClock())
    line.send(await clients.place())
    held = await clients.hold(line.stop)
    await bus.close()
    return held


def _connect(url: str, name: str) -> Any:
    return NatsBus.connect(url, run_id="burst", store=MemoryStore(), name=name)


def _child(work: Work, url: str, scenario: BurstScenario, policy: str, line: Connection) -> None:
    import uvloop

    async def run() -> None:
        began_s = time.process_time()
        found = await work(url, scenario, policy, ChildPipe(line))
        line.send((found, time.process_time() - began_s))

    uvloop.run(run())


class Child:
    """A child process, seen from its parent."""

    def __init__(self, work: Work, *arguments: Any) -> None:
        self._name = work.__name__
        self._connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        arguments = (work, *arguments, theirs)
        self._process = context.Process(target=_child, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    async def receive(self, within_s: float) -> Any:
        """Return what it sends next.

        Raises:
            DeadlineError: Nothing, in that time.

        """
        if not await asyncio.to_thread(self._connection.poll, within_s):
            raise DeadlineError(f"{self._name}: silent for {within_s:g} s")
        return self._connection.recv()

    async def end(self) -> Any:
        """Stop it; return its result."""
        self._connection.send("stop")
        return await self.receive(END_S_MAX)

    async def kill(self) -> None:
        """Kill it."""
        self._process.kill()
        await asyncio.to_thread(self._process.join, END_S_MAX)


async def place_over_nats(scenario: BurstScenario, policy: str) -> dict[str, Any]:
    """Place all groups of a scenario through a new server; return the figures."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-burst-"))
        server = EmbeddedServer(store_dir=Path(folder) / "nats")
        await server.start()
        stack.push_async_callback(server.stop)
        bus = await _connect(server.url, "simulation")
        stack.push_async_callback(bus.close)
        await bus.provision()

        async def start(work: Work) -> Child:
            child = Child(work, server.url, scenario, policy)
            stack.push_async_callback(child.kill)
            await child.receive(START_S_MAX)
            return child

        scheduler, hosts = await start(schedule), await start(serve_hosts)
        await asyncio.sleep(LEARN_S)
        clients = await start(lease_all)
        figures = await clients.receive(BURST_S_MAX)
        await asyncio.sleep(SETTLE_S)
        (found, hosts_s), (held, clients_s) = await hosts.end(), await clients.end()
        _, scheduler_s = await scheduler.end()
        spent = {"scheduler": scheduler_s, "hosts": hosts_s, "clients": clients_s}
        cpu_s = {name: round(spent_s, 2) for name, spent_s in spent.items()}
        return figures | audit(scenario, held, found) | {"cpu_s": cpu_s}
