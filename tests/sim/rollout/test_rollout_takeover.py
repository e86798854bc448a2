"""Whoever takes an episode over leaves no machine of it behind: a full host has room at once."""

import pytest
from tests.sim.rollout.conftest import World, make_command

from penstock.envs.sandbox_client.client import LeaseSpec, SandboxBusyError, lease_sandbox
from penstock.messages.rollout import EpisodeEnd, RolloutFinished
from penstock.messages.sandbox import AcquireSandbox

ROLLOUT = "g0-m0"
LEFT = AcquireSandbox(lease_id="of-a-dead-worker", holder=ROLLOUT, lease_s=60.0)


async def leave_a_lease(world: World) -> None:
    """Do as a worker that is killed: it says nothing more."""
    await world.client().request("sandbox.acquire", LEFT, deadline_s=5.0)


def test_an_episodes_next_worker_does_not_wait_for_its_last_ones_lease(simulate) -> None:
    async def scenario(world: World) -> None:
        world.host(world.policy)
        world.host_machines(live_max=1)
        await leave_a_lease(world)
        began_s = world.client().monotonic()
        world.host_worker()
        await world.publish(make_command(ROLLOUT))
        [rollout] = await world.wait_for(RolloutFinished, 1)
        assert rollout.end is EpisodeEnd.FINISHED
        assert world.client().monotonic() - began_s < 10.0
        assert [machine.alive for machine in world.backend.machines] == [False, False]

    simulate(scenario)


@pytest.mark.parametrize(("holder", "takes_over"), [("g0-m1", True), (ROLLOUT, False)])
def test_others_and_who_does_not_say_so_end_no_machine(simulate, holder, takes_over) -> None:
    async def scenario(world: World) -> None:
        world.host_machines(live_max=1)
        await leave_a_lease(world)
        spec = LeaseSpec(holder=holder, acquire_wait_s=20.0, takes_over=takes_over)
        with pytest.raises(SandboxBusyError):
            async with lease_sandbox(world.client(), "lease-2", spec):
                pass
        assert world.backend.machines[0].alive

    simulate(scenario)


def test_asking_twice_ends_nothing(simulate) -> None:
    async def scenario(world: World) -> None:
        world.host_machines(live_max=2)
        spec = LeaseSpec(holder=ROLLOUT, takes_over=True)
        async with (
            lease_sandbox(world.client(), "a", spec),
            lease_sandbox(world.client(), "a", spec) as again,
        ):
            assert await again.list_files("/work") == []
        assert len(world.backend.machines) == 1

    simulate(scenario)
