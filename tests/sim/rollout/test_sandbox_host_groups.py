"""Groups on hosts, over the bus: placed once, held as long as their machines, adopted, moved."""

import asyncio

import pytest
from tests.sim.rollout.conftest import World, make_command
from tests.sim.rollout.fleet import Fleet

from penstock.actors.scheduler.actor import SandboxScheduler
from penstock.envs.sandbox_client.client import LeaseSpec, SandboxBusyError, lease_sandbox
from penstock.envs.sandbox_client.group import acquire_group, lease_group, renew_groups
from penstock.messages.errors import RemoteCallError
from penstock.messages.requests.scheduler import ReleaseGroup
from penstock.messages.rollout import EpisodeEnd, RolloutFinished
from penstock.messages.task import Purpose


def test_a_group_is_placed_on_one_host_and_waits_where_there_is_no_room(simulate) -> None:
    async def scenario(world: World) -> None:
        fleet = Fleet(world, 3)
        await world.sleep(3.0)
        held = [asyncio.create_task(fleet.hosts_of(f"g{n}", 8.0)) for n in range(3)]
        await world.sleep(1.0)
        with pytest.raises(SandboxBusyError, match="no room for 4 machines on 3 hosts"):
            await fleet.hosts_of("late", 0.0)
        placed = await asyncio.gather(*held)
        assert sorted(len(hosts) for hosts in placed) == [1, 1, 1]
        assert len(set.union(*placed)) == 3
        await world.sleep(1.5)  # Its room ends with the machines: a host's next report says so.
        assert len(await fleet.hosts_of("late", 0.0)) == 1

    simulate(scenario)


def test_a_scheduler_that_was_killed_adopts_the_groups_that_hosts_hold(simulate) -> None:
    async def scenario(world: World) -> None:
        fleet = Fleet(world, 8)
        await world.sleep(3.0)
        before = {f"g{n}": await fleet.place(f"g{n}") for n in range(6)}
        holding = [
            asyncio.create_task(fleet.host_of(f"{group}.0", fleet.spec(group), 20.0))
            for group in before
        ]
        await world.sleep(0.5)
        await fleet.scheduler.kill()
        world.host(SandboxScheduler(), name="scheduler")
        with pytest.raises(RemoteCallError, match="has just started"):
            await fleet.place("new")
        await world.sleep(1.5)
        after = {group: await fleet.place(group) for group in before}
        assert after == before
        assert await asyncio.gather(*holding) == list(before.values())
        assert fleet.num_booted == 6

    simulate(scenario)


def test_a_group_whose_host_does_not_answer_gets_another_one_at_once(simulate) -> None:
    async def scenario(world: World) -> None:
        fleet = Fleet(world, 3)
        await world.sleep(3.0)
        dead = await fleet.place("g")
        await fleet.hosts[dead].kill()
        assert await fleet.host_of("g.0", fleet.spec("g")) != dead

    simulate(scenario)


def test_a_holders_quota_bounds_its_groups_and_nobody_elses(simulate) -> None:
    async def scenario(world: World) -> None:
        fleet = Fleet(world, 4, quota=8)
        await world.sleep(3.0)
        one = [asyncio.create_task(fleet.hosts_of(f"g{n}", 8.0)) for n in range(2)]
        await world.sleep(1.0)
        with pytest.raises(SandboxBusyError, match="test: 4 more exceed its quota of 8"):
            await fleet.host_of("third.0", fleet.spec("third"))
        assert await fleet.host_of("other.0", fleet.spec("other", holder="other"))
        await asyncio.gather(*one)

    simulate(scenario)


def test_what_is_released_at_the_scheduler_has_no_room(simulate) -> None:
    async def scenario(world: World) -> None:
        fleet = Fleet(world, 1)
        await world.sleep(3.0)
        await fleet.place("g")
        await world.client().request("scheduler", ReleaseGroup(group_id="g"), deadline_s=2.0)
        assert await fleet.place("other") == "h0"

    simulate(scenario)


def test_a_group_is_leased_renewed_and_given_back_as_one(simulate) -> None:
    async def scenario(world: World) -> None:
        fleet = Fleet(world, 2)
        await world.sleep(3.0)
        spec = fleet.spec("g")
        lease_ids = [f"g.{n}" for n in range(4)]
        async with lease_group(world.client(), spec.group, lease_ids, spec) as machines:
            await world.sleep(30.0)  # Three times the lease.
            await asyncio.gather(*(m.write_files({"a": b""}) for m in machines))

            again = await acquire_group(world.client(), spec.group, lease_ids, spec)
            assert again.host == machines[0]._leased.host
            assert fleet.num_booted == 4
        await world.sleep(1.5)
        assert [m.alive for b in fleet.backends.values() for m in b.machines] == [False] * 4
        assert await renew_groups(world.client(), again.host, ["g"], spec) == ["g"]

    simulate(scenario)


def test_a_group_whose_host_has_no_room_gets_no_machine_of_it(simulate) -> None:
    async def scenario(world: World) -> None:
        fleet = Fleet(world, 1)
        await world.sleep(3.0)
        async with lease_sandbox(world.client(), "other", LeaseSpec(holder="other")):
            await world.sleep(0.1)  # The scheduler has not heard of it.
            spec = fleet.spec("g")
            wanted = [f"g.{n}" for n in range(4)]
            with pytest.raises(SandboxBusyError, match="no room for g within 3 s"):
                await acquire_group(world.client(), spec.group, wanted, spec)
            await world.sleep(6.0)  # The host waits so long for room, then gives up all of it.
            alive = [m.alive for m in fleet.backends["h0"].machines]
            assert sum(alive) == 1

    simulate(scenario)


def test_an_evaluation_of_more_tasks_than_a_host_holds_finds_room(simulate) -> None:
    async def scenario(world: World) -> None:
        Fleet(world, 2)
        world.host(world.policy)
        world.host_worker(places_groups=True)
        await world.sleep(3.0)
        commands = [
            make_command(f"e0-{n}", group_id="0", group_size=12, member=n, purpose=Purpose.EVAL)
            for n in range(12)
        ]
        await world.publish(*commands)
        rollouts = await world.wait_for(RolloutFinished, len(commands))
        assert {rollout.end for rollout in rollouts} == {EpisodeEnd.FINISHED}

    simulate(scenario)
