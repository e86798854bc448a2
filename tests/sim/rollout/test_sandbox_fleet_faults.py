"""Machines, hosts and lines that fail under a run: typed outcomes in time, none of them trained."""

import asyncio

import pytest
from tests.sim.rollout.conftest import FINISH, FIX, LOOK, World, make_command
from tests.sim.rollout.fleet import Fleet

from penstock.actors.trainer.batching.batcher import Batcher
from penstock.actors.trainer.config import TrainerConfig
from penstock.envs.microvm.pool import pool
from penstock.envs.sandbox import SandboxDied, SandboxTimeout
from penstock.envs.sandbox_client.client import LeaseSpec, SandboxBusyError, lease_sandbox
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import EpisodeEnd, RolloutFinished, TurnSampled
from penstock.messages.sandbox import AcquireSandbox, ReleaseSandbox
from penstock.messages.task import CreditsChanged

NUM_GROUPS, GROUP_SIZE = 4, 4
SPEC = LeaseSpec(holder="test", lease_s=10.0, acquire_wait_s=5.0, margin_s=2.0)


async def run_groups(world: World, fleet: Fleet, *, num_machines_max: int) -> list[RolloutFinished]:
    """Run groups of slow episodes; one host dies while they are on it."""
    world.policy.scripts = lambda _session: [[LOOK], [LOOK], [FIX], [LOOK], [FINISH]]
    world.policy.token_s = 0.2
    world.host(world.policy)
    world.host_judge()
    world.host_worker(places_groups=True, num_machines_max=num_machines_max)
    await world.sleep(3.0)
    commands = [
        make_command(
            f"g{group}-m{member}", group_id=f"g{group}", group_index=group,
            group_size=GROUP_SIZE, member=member,
        )
        for group in range(NUM_GROUPS)
        for member in range(GROUP_SIZE)
    ]  # fmt: skip
    await world.publish(*commands)
    await world.sleep(1.0)
    assert {len(backend.machines) for backend in fleet.backends.values()} == {8}
    await fleet.hosts["h0"].kill()
    return await world.wait_for(RolloutFinished, len(commands))


def test_episodes_of_a_host_that_died_go_on_elsewhere(simulate) -> None:
    async def scenario(world: World) -> None:
        fleet = Fleet(world, 2, live_max=20)
        rollouts = await run_groups(world, fleet, num_machines_max=3)
        assert {rollout.end for rollout in rollouts} == {EpisodeEnd.FINISHED}
        assert len(fleet.backends["h1"].machines) >= 16
        await world.check_ledger()

    simulate(scenario)


def test_infrastructure_failures_are_all_masked_from_the_loss(simulate) -> None:
    async def scenario(world: World) -> None:
        fleet = Fleet(world, 2, live_max=24)
        rollouts = await run_groups(world, fleet, num_machines_max=1)
        lost = {r.rollout_id for r in rollouts if r.end is EpisodeEnd.INFRASTRUCTURE_ERROR}
        assert len(lost) == 8  # All that were on the host, and no other.
        verdicts = await world.wait_for(Verdict, len(rollouts))
        batcher = Batcher(TrainerConfig(groups_per_batch=NUM_GROUPS, filter_zero_variance=False))
        batcher.add_credits(
            CreditsChanged(
                policy_version=0, num_groups_granted=NUM_GROUPS, num_groups_trained=0,
                num_groups_discarded=0, num_groups_allowed=NUM_GROUPS, staleness_max=0,
            )
        )  # fmt: skip
        for event in await world.read(TurnSampled):
            batcher.add_turn(event)
        for rollout in rollouts:
            batcher.add_rollout(rollout)
        for verdict in verdicts:
            batcher.add_verdict(verdict)
        manifest = batcher.propose(1)
        entries = [*manifest.groups, *manifest.discarded]
        samples = [sample for entry in entries for sample in entry.samples]
        masked = {s.rollout_id for s in samples if s.outcome is Outcome.INFRASTRUCTURE_ERROR}
        assert masked == lost
        trained = [sample for entry in manifest.groups for sample in entry.samples]
        assert not [s for s in trained if s.rollout_id in lost and s.advantage != 0.0]

    simulate(scenario)


def test_a_guest_that_hangs_is_a_timeout_within_its_deadline(simulate) -> None:
    async def scenario(world: World) -> None:
        world.host_machines()
        client = world.client()
        async with lease_sandbox(client, "lease-1", SPEC) as sandbox:
            world.backend.machines[0]._delay_s = 1e6
            began = client.monotonic()
            with pytest.raises(SandboxTimeout, match="does not answer"):
                await sandbox.exec(["sleep", "1"], timeout_s=3.0)
            assert client.monotonic() - began == pytest.approx(3.0 + SPEC.margin_s, abs=0.5)

    simulate(scenario)


def test_a_host_that_dies_while_a_machine_boots_is_busy_within_the_deadline(simulate) -> None:
    async def scenario(world: World) -> None:
        host = world.host_machines()
        client = world.client()
        began = client.monotonic()

        async def wait_for_machine() -> None:
            async with lease_sandbox(client, "lease-1", SPEC):
                raise AssertionError("leased")

        waiting = asyncio.create_task(wait_for_machine())
        await world.sleep(0.01)
        await host.kill()
        with pytest.raises(SandboxBusyError, match="no sandbox host with room within 5 s"):
            await waiting
        assert client.monotonic() - began <= SPEC.acquire_wait_s + SPEC.margin_s + 0.5

    simulate(scenario)


def test_a_release_that_overtakes_its_request_costs_one_lease(simulate) -> None:
    async def scenario(world: World) -> None:
        world.host_machines()
        client = world.client()
        wanted = AcquireSandbox(lease_id="raced", holder="test", lease_s=3.0)
        released = client.request(
            "sandbox.host-0", ReleaseSandbox(lease_id="raced"), deadline_s=2.0
        )
        await asyncio.gather(client.request("sandbox.acquire", wanted, deadline_s=2.0), released)
        assert [machine.alive for machine in world.backend.machines] == [True]
        await world.sleep(5.0)
        assert [machine.alive for machine in world.backend.machines] == [False]

    simulate(scenario)


def test_an_operation_on_a_lease_that_expired_is_a_death(simulate) -> None:
    async def scenario(world: World) -> None:
        world.host_machines(lease_s_max=2.0)
        spec = LeaseSpec(holder="test", lease_s=30.0, acquire_wait_s=5.0)
        async with lease_sandbox(world.client(), "late", spec) as sandbox:
            await world.sleep(5.0)
            with pytest.raises(SandboxDied, match="expired"):
                await sandbox.exec(["true"], timeout_s=1.0)

    simulate(scenario)


def test_more_askers_than_a_host_lets_wait_are_all_served_in_the_end(simulate, monkeypatch) -> None:
    monkeypatch.setattr(pool, "WAITERS_MAX", 2)

    async def scenario(world: World) -> None:
        world.host_machines(live_max=2, reserved_slots=0, acquire_s_max=1.0)
        spec = LeaseSpec(holder="test", lease_s=10.0, acquire_wait_s=60.0)
        most_live = 0

        async def hold(number: int) -> None:
            nonlocal most_live
            async with lease_sandbox(world.client(), f"lease-{number}", spec):
                await world.sleep(0.5)
                live = sum(machine.alive for machine in world.backend.machines)
                most_live = max(most_live, live)

        await asyncio.gather(*(hold(number) for number in range(20)))
        assert most_live == 2
        with pytest.raises(SandboxBusyError, match=r"no machine within 1 s|wait for a machine"):
            await asyncio.gather(*(ask_once(world, number) for number in range(5)))

    simulate(scenario)


async def ask_once(world: World, number: int) -> None:
    """Hold a machine for long, waiting for none."""
    spec = LeaseSpec(holder="test", lease_s=10.0, acquire_wait_s=0.1)
    async with lease_sandbox(world.client(), f"greedy-{number}", spec):
        await world.sleep(5.0)
