"""Rollouts that want more machines than there are leave room for grading."""

import asyncio
import contextlib
import random

import msgspec
import pytest
from tests.sim.rollout.conftest import World
from tests.support.virtual_clock import VirtualClock

from penstock.actors.scheduler.actor import SandboxScheduler
from penstock.actors.scheduler.host_registry import HostRegistry, HostsFullError
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.sandbox import SandboxError
from penstock.envs.sandbox_client.client import (
    GroupSpec,
    LeaseSpec,
    SandboxBusyError,
    lease_sandbox,
)
from penstock.messages.errors import DeadlineError

EPISODE_S = 100.0
SPEC = LeaseSpec(holder="rollout", lease_s=60.0)
GRADING = LeaseSpec(holder="judge", lease_s=60.0, is_grading=True)


async def run_episodes(world: World, worker: int, num_episodes: int) -> int:
    """Run one episode after the other; return how many got a machine."""
    num_run = 0
    for episode in range(num_episodes):
        with contextlib.suppress(SandboxBusyError):
            async with lease_sandbox(world.client(), f"rollout-{worker}-{episode}", SPEC):
                num_run += 1
                await world.sleep(EPISODE_S)
    return num_run


async def grade(world: World, number: int) -> float:
    """Grade one rollout; return how long that waited for a machine."""
    client = world.client()
    began_s = client.monotonic()
    async with lease_sandbox(client, f"grading-{number}", GRADING):
        waited_s = client.monotonic() - began_s
        await world.sleep(2.0)
    return waited_s


def test_grading_waits_for_no_rollout(simulate) -> None:
    async def scenario(world: World) -> None:
        world.host_machines(live_max=4)
        rollouts = [asyncio.create_task(run_episodes(world, n, 3)) for n in range(16)]
        await world.sleep(10.0)
        waited_s = [await grade(world, number) for number in range(20)]
        assert max(waited_s) < 1.0
        counts = await asyncio.gather(*rollouts)
        assert sum(counts) >= 9  # Three at a time, all the while.

    simulate(scenario)


def test_who_waits_for_room_twice_gets_one_machine(simulate) -> None:
    async def scenario(world: World) -> None:
        clock = VirtualClock().monotonic
        async with Pool(world.backend, size=0, live_max=2, monotonic=clock) as pool:
            await pool.acquire(600.0, lease_id="a", reserved_slots=1)
            asked = [pool.acquire(600.0, lease_id="b", reserved_slots=1) for _ in range(2)]
            waiting = [asyncio.create_task(one) for one in asked]
            await world.sleep(5.0)
            assert pool.counters().waiting == 2
            await pool.release("a")
            one, two = await asyncio.gather(*waiting)
            assert one is two
            with pytest.raises(DeadlineError):
                await pool.acquire(600.0, lease_id="c", reserved_slots=1, timeout_s=3.0)
            assert pool.counters().waiting == 0
        assert len(world.backend.machines) == 2

    simulate(scenario)


def test_a_grading_that_got_no_machine_leaves_no_room_behind(simulate) -> None:
    async def scenario(world: World) -> None:
        world.host(SandboxScheduler())
        world.host_machines(live_max=1, reports_to_scheduler=True)
        await world.sleep(4.0)  # The scheduler listens to hosts before it places anything.
        world.backend.is_broken = True
        for name in ("first", "second"):
            group = GroupSpec(group_id=name, num_machines=1)
            spec = msgspec.structs.replace(GRADING, group=group, acquire_wait_s=5.0)
            with pytest.raises(SandboxError, match="no boot today"):
                async with lease_sandbox(world.client(), name, spec):
                    pass

    simulate(scenario)


def test_a_host_of_one_machine_keeps_none(simulate) -> None:
    async def scenario(world: World) -> None:
        world.host_machines(live_max=1)
        assert await run_episodes(world, 0, 2) == 2

    simulate(scenario)


def test_the_scheduler_places_grading_where_rollouts_find_no_room() -> None:
    fleet = HostRegistry(random.Random(0))
    fleet.report("a", num_slots=8, reserved_slots=1, num_live=0, now=0.0)
    wanted = {"image": "", "holder": "train", "lease_s": 60.0, "now": 0.0}
    fleet.place("g0", num_machines=6, **wanted)
    fleet.place("g1", num_machines=1, **wanted)
    with pytest.raises(HostsFullError):
        fleet.place("g2", num_machines=1, **wanted)
    assert fleet.place("grade", num_machines=1, is_grading=True, **wanted).host == "a"


def test_a_group_as_large_as_a_host_gets_it_when_it_is_empty() -> None:
    fleet = HostRegistry(random.Random(0))
    fleet.report("a", num_slots=8, reserved_slots=1, num_live=0, now=0.0)
    wanted = {"image": "", "holder": "train", "lease_s": 60.0, "now": 0.0}
    assert fleet.place("g0", num_machines=8, **wanted).host == "a"
