"""Leases over a bad line: late answers end no renewal, silent hosts are not asked twice."""

import asyncio
from collections.abc import Callable

import pytest
from tests.sim.rollout.conftest import World
from tests.sim.rollout.fleet import Fleet

from penstock.envs.sandbox import SandboxDied
from penstock.envs.sandbox_client.client import LeaseSpec, lease_sandbox
from penstock.envs.sandbox_client.group import lease_group
from penstock.messages.base import Message
from penstock.messages.errors import DeadlineError
from penstock.messages.sandbox import AcquireSandbox, RenewGroups

SPEC = LeaseSpec(holder="test", lease_s=9.0, acquire_wait_s=5.0, margin_s=2.0)


class Line:
    """An client whose requests are counted; some are not answered."""

    def __init__(self, world: World, is_lost: Callable[[Message, int], bool]) -> None:
        self._client = world.client()
        self._is_lost = is_lost
        self.asked: list[tuple[str, Message]] = []
        self.sleep, self.monotonic = self._client.sleep, self._client.monotonic

    async def request(
        self, service: str, message: Message, *, deadline_s: float, reason: str = ""
    ) -> Message:
        number = self.count(type(message))
        self.asked.append((service, message))
        if self._is_lost(message, number):
            await self._client.sleep(deadline_s)
            raise DeadlineError("late")
        return await self._client.request(service, message, deadline_s=deadline_s, reason=reason)

    def count(self, message_type: type[Message]) -> int:
        return sum(isinstance(message, message_type) for _, message in self.asked)


def test_a_machines_lease_outlives_a_late_answer(simulate) -> None:
    async def scenario(world: World) -> None:
        world.host_machines()
        line = Line(world, lambda m, n: isinstance(m, AcquireSandbox) and n in {1, 2})
        async with lease_sandbox(line, "lease", SPEC) as sandbox:
            await world.sleep(60.0)
            await sandbox.write_files({"a": b""})
        assert len(world.backend.machines) == 1

    simulate(scenario)


def test_a_groups_lease_outlives_a_late_answer(simulate) -> None:
    async def scenario(world: World) -> None:
        fleet = Fleet(world, 1)
        await world.sleep(3.0)
        line = Line(world, lambda m, n: isinstance(m, RenewGroups) and n in {0, 1})
        spec = fleet.spec("g")
        names = [f"g.{n}" for n in range(4)]
        async with lease_group(line, spec.group, names, spec) as machines:
            await world.sleep(60.0)
            await asyncio.gather(*(machine.write_files({"a": b""}) for machine in machines))
        assert fleet.num_booted == 4

    simulate(scenario)


def test_renewal_ends_where_the_lease_is_lost_or_nobody_answered_for_all_of_it(simulate) -> None:
    async def scenario(world: World) -> None:
        world.host_machines(lease_s_max=1.0)
        line = Line(world, lambda _m, _n: False)
        async with lease_sandbox(line, "short", SPEC) as sandbox:
            await world.sleep(60.0)
            assert line.count(AcquireSandbox) == 2  # The one after 3 s hears that it is gone.
            with pytest.raises(SandboxDied):
                await sandbox.write_files({"a": b""})
        line = Line(world, lambda m, n: isinstance(m, AcquireSandbox) and n > 0)
        async with lease_sandbox(line, "silent", SPEC):
            await world.sleep(SPEC.lease_s + SPEC.margin_s)
            count = line.count(AcquireSandbox)
            assert count > 2
            await world.sleep(60.0)
            assert line.count(AcquireSandbox) == count

    simulate(scenario)


def test_a_full_fleet_does_not_send_an_asker_back_to_its_dead_host(simulate) -> None:
    async def scenario(world: World) -> None:
        fleet = Fleet(world, 2)
        await world.sleep(3.0)
        dead = await fleet.place("g")
        other = asyncio.create_task(fleet.hosts_of("other", 4.0))
        await world.sleep(0.5)
        await fleet.hosts[dead].kill()
        line = Line(world, lambda _m, _n: False)
        spec = LeaseSpec(
            holder="test", acquire_wait_s=20.0, margin_s=0.5, group=fleet.spec("g").group
        )
        async with lease_sandbox(line, "g.0", spec) as sandbox:
            assert sandbox.info
        hosts = [service for service, _ in line.asked if service.startswith("sandbox.")]
        assert hosts.count(f"sandbox.{dead}") == 1
        assert {f"sandbox.{host}" for host in await other} == set(hosts) - {f"sandbox.{dead}"}

    simulate(scenario)
