"""A scheduler and hosts of fake machines that report to it."""

import asyncio

from tests.sim.rollout.conftest import Hosted, World
from tests.sim.rollout.machines import FakeBackend
from tests.support.virtual_clock import VirtualClock

from penstock.actors.sandbox_host.actor import SandboxHost
from penstock.actors.sandbox_host.config import SandboxHostConfig
from penstock.actors.scheduler.actor import SandboxScheduler
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.sandbox_client.client import GroupSpec, LeaseSpec, lease_sandbox
from penstock.messages.requests.scheduler import GroupPlaced, PlaceGroup


class Fleet:
    """Hosts `h0`, `h1`..., each with a pool of its own."""

    def __init__(self, world: World, num_hosts: int, *, live_max: int = 4, quota: int = 0) -> None:
        self.world = world
        self.scheduler = world.host(SandboxScheduler(quota), name="scheduler")
        self.backends = {f"h{number}": FakeBackend() for number in range(num_hosts)}
        self.hosts: dict[str, Hosted] = {}
        for name, backend in self.backends.items():
            clock = VirtualClock().monotonic
            pool = Pool(backend, size=0, live_max=live_max, monotonic=clock)
            host = SandboxHost(pool, name, SandboxHostConfig(reports_to_scheduler=True))
            self.hosts[name] = world.host(host, name=f"sandbox-{name}")

    def spec(self, group_id: str, num_machines: int = 4, holder: str = "") -> LeaseSpec:
        group = GroupSpec(group_id=group_id, num_machines=num_machines, holder=holder)
        return LeaseSpec(holder="test", lease_s=10.0, acquire_wait_s=3.0, margin_s=2.0, group=group)

    async def host_of(self, lease_id: str, spec: LeaseSpec, held_s: float = 0.0) -> str:
        """Hold one machine for a time; return its host."""
        async with lease_sandbox(self.world.client(), lease_id, spec) as sandbox:
            await self.world.sleep(held_s)
            return sandbox._leased.host

    async def hosts_of(self, group_id: str, held_s: float) -> set[str]:
        """Hold a whole group for a time; return its hosts."""
        spec = self.spec(group_id)
        members = (self.host_of(f"{group_id}.{n}", spec, held_s) for n in range(4))
        return set(await asyncio.gather(*members))

    @property
    def num_booted(self) -> int:
        """Machines of all hosts, dead ones too."""
        return sum(len(backend.machines) for backend in self.backends.values())

    async def place(self, group_id: str) -> str:
        """Ask the scheduler alone."""
        wanted = PlaceGroup(group_id=group_id, holder="test", num_machines=4, lease_s=10.0)
        placed = await self.world.client().request("scheduler", wanted, deadline_s=2.0)
        assert isinstance(placed, GroupPlaced)
        return placed.host
