"""A policy that wants its bad episodes masked: each such end is its own, and accounted.

A rollout that ends as an infrastructure error is neither trained nor part of its group's baseline,
so whatever a policy could cause of that kind would hide its failures.
"""

from collections.abc import AsyncIterator

import pytest
from tests.sim.rollout.conftest import (
    FINISH,
    FIX,
    LOOK,
    World,
    make_command,
    make_task,
    simulate,
    tokenizer,
)

from penstock.messages.errors import RemoteCallError
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import EpisodeEnd, RolloutFinished
from penstock.messages.rpc import RemoteErrorKind
from penstock.messages.task import Purpose

__all__ = ["simulate", "tokenizer"]


async def end_of(world: World, command=None) -> tuple[RolloutFinished, Verdict]:
    """Run one episode and grade it."""
    await world.put_tasks(1, 1)
    world.host_judge()
    await world.publish(command or make_command("g0-m0", make_task("train-0")))
    [rollout] = await world.wait_for(RolloutFinished, 1)
    [verdict] = await world.wait_for(Verdict, 1)
    await world.check_ledger()
    return rollout, verdict


def refuse(world: World, kind: RemoteErrorKind, text: str, above: int | None = None) -> None:
    """Let the engine refuse contexts of more tokens, by default than the first."""
    generate = world.policy._generate

    async def limited(request) -> AsyncIterator:
        length, asked = request.token_ids.shape[0], world.policy.requests
        bound = above or (asked[0].token_ids.shape[0] if asked else length)
        if length > bound:
            asked.append(request)
            raise RemoteCallError(kind, text.format(length=length, above=bound))
        async for reply in generate(request):
            yield reply

    world.policy._generate = limited


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.EVAL])
def test_a_context_that_outgrows_the_engine_is_graded(simulate, purpose) -> None:
    """The policy fixes the file, then reads on until the engine has no room."""

    async def scenario(world: World) -> None:
        world.policy.scripts = lambda _session: [[FIX], *[[LOOK, LOOK]] * 6, [FINISH]]
        refuse(
            world,
            RemoteErrorKind.TOO_LONG,
            "token_ids: got {length} tokens, expected 1..{above}",
            150,
        )
        world.host(world.policy)
        world.host_machines()
        world.host_worker()
        split = "train-0" if purpose is Purpose.TRAIN else "heldout-0"
        rollout, verdict = await end_of(
            world, make_command("g0-m0", make_task(split), purpose=purpose)
        )
        assert rollout.end is EpisodeEnd.TOKEN_LIMIT
        assert rollout.turns
        assert verdict.outcome is Outcome.SOLVED  # its files by then are right
        assert not verdict.outcome.is_masked

    simulate(scenario)


def test_a_prompt_that_outgrows_the_engine_is_no_infrastructure_error(simulate) -> None:
    async def scenario(world: World) -> None:
        refuse(
            world,
            RemoteErrorKind.TOO_LONG,
            "token_ids: got {length} tokens, expected 1..{above}",
            3,
        )
        world.host(world.policy)
        world.host_machines()
        world.host_worker()
        rollout, verdict = await end_of(world)
        assert (rollout.end, rollout.turns) == (EpisodeEnd.TOKEN_LIMIT, [])
        assert verdict.outcome is Outcome.FAILED

    simulate(scenario)


def test_a_turn_that_engines_fail_at_twice_is_the_policys(simulate) -> None:
    async def scenario(world: World) -> None:
        world.policy.scripts = lambda _session: [[LOOK], [FIX], [FINISH]]
        refuse(world, RemoteErrorKind.CHARGED, "its logits are no numbers")
        world.host(world.policy)
        world.host_machines()
        world.host_worker()
        rollout, verdict = await end_of(world)
        assert rollout.end is EpisodeEnd.POLICY_ERROR
        assert "no numbers" in rollout.error
        assert verdict.outcome is Outcome.POLICY_ERROR
        longest = max(request.token_ids.shape[0] for request in world.policy.requests)
        tries = [r for r in world.policy.requests if r.token_ids.shape[0] == longest]
        assert len(tries) == 2

    simulate(scenario)


RUN = ("run_terminal", {"command": "python3 m.py"})
LOOKS = [[LOOK], [LOOK], [FIX], [FINISH]]


def start(world: World, num_hosts: int = 1, **settings: object) -> None:
    world.policy.scripts = lambda _session: LOOKS
    world.host(world.policy)
    for number in range(num_hosts):
        world.host_machines(name=f"host-{number}")
    world.host_worker(**settings)


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_a_turn_that_kills_machine_after_machine_is_the_policys(simulate, num_hosts) -> None:
    async def scenario(world: World) -> None:
        start(world, num_hosts)
        world.backend.deaths[-1] = 3  # the canary and the files are written, then a turn runs
        rollout, verdict = await end_of(world)
        assert rollout.end is EpisodeEnd.POLICY_ERROR
        assert "2 machines killed" in rollout.error
        assert len(rollout.turns) == len(world.policy.requests)  # nothing sampled again
        assert verdict.outcome is Outcome.POLICY_ERROR
        machines = [m for m in world.backend.machines if m.commands or not m.alive]
        assert len(machines) >= 2

    simulate(scenario)


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_a_call_that_hangs_machine_after_machine_is_the_policys(simulate, num_hosts) -> None:
    """The host notices that a machine hangs before the worker gives its host up."""

    async def scenario(world: World) -> None:
        start(world, num_hosts)
        world.policy.scripts = lambda _session: [[RUN], [RUN], [FINISH]]
        world.backend.hang = True
        world.backend.deaths[-1] = 3
        rollout, verdict = await end_of(world)
        assert rollout.end is EpisodeEnd.POLICY_ERROR
        assert "2 machines killed" in rollout.error
        assert verdict.outcome is Outcome.POLICY_ERROR

    simulate(scenario)


@pytest.mark.parametrize("num_machines_max", [1, 3])
def test_one_death_may_be_chance_and_the_episode_goes_on(simulate, num_machines_max) -> None:
    async def scenario(world: World) -> None:
        start(world, num_machines_max=num_machines_max)
        world.backend.deaths[0] = 3
        rollout, verdict = await end_of(world)
        assert (rollout.end, verdict.outcome) == (EpisodeEnd.FINISHED, Outcome.SOLVED)

    simulate(scenario)


@pytest.mark.parametrize("hang", [False, True])
def test_files_that_kill_machine_after_machine_in_grading_are_the_policys(simulate, hang) -> None:
    async def scenario(world: World) -> None:
        start(world)
        world.backend.hang = hang
        world.backend.deaths |= {0: 0, -1: 3}  # what is laid out lives, what runs it does not
        rollout, verdict = await end_of(world)
        assert (rollout.end, verdict.outcome) == (EpisodeEnd.FINISHED, Outcome.POLICY_ERROR)
        assert "2 machines killed" in verdict.detail
        assert any(one.is_decisive for one in verdict.findings)

    simulate(scenario)


@pytest.mark.parametrize("are_killed", [False, True])
def test_a_grading_machine_that_others_killed_convicts_nobody(simulate, are_killed) -> None:
    async def scenario(world: World) -> None:
        start(world)
        world.backend.are_killed = are_killed
        world.backend.deaths |= {0: 0, -1: 3} if are_killed else {1: 3}
        rollout, verdict = await end_of(world)
        expected = Outcome.INFRASTRUCTURE_ERROR if are_killed else Outcome.SOLVED
        assert (rollout.end, verdict.outcome) == (EpisodeEnd.FINISHED, expected)

    simulate(scenario)


def test_killing_by_turns_does_not_mask_either(simulate) -> None:
    """Each time another turn's call ends the machine."""

    async def scenario(world: World) -> None:
        start(world)
        world.backend.deaths.update({0: 3, 1: 4, 2: 5, 3: 6})
        rollout, verdict = await end_of(world)
        assert rollout.end is EpisodeEnd.POLICY_ERROR
        assert verdict.outcome is Outcome.POLICY_ERROR

    simulate(scenario)


def test_a_machine_that_dies_when_its_files_are_read_is_the_policys(simulate) -> None:
    """Files that nobody can read end the machine after the last turn."""

    async def scenario(world: World) -> None:
        world.policy.scripts = lambda _session: [[FINISH]]
        world.host(world.policy)
        world.host_machines()
        world.host_worker()
        world.backend.deaths[-1] = 2
        rollout, _ = await end_of(world)
        assert rollout.end is EpisodeEnd.POLICY_ERROR

    simulate(scenario)


def test_a_host_whose_machines_all_die_charges_nobody(simulate) -> None:
    """Eight episodes, and their machines die under them, again and again, at the same time."""

    async def scenario(world: World) -> None:
        start(world, num_concurrent=8)
        world.backend.deaths[-1] = 4
        await world.publish(*[make_command(f"g0-m{n}", make_task("train-0")) for n in range(8)])
        for rollout in await world.wait_for(RolloutFinished, 8):
            assert rollout.end is EpisodeEnd.INFRASTRUCTURE_ERROR

    simulate(scenario)


@pytest.mark.parametrize("num_kills", [6, pytest.param(120, marks=pytest.mark.slow)])
def test_hosts_killed_on_purpose_charge_nobody(simulate, num_kills) -> None:
    """Hosts are killed under episodes: none of these becomes a policy's error."""

    async def scenario(world: World) -> None:
        world.policy.scripts = lambda _session: LOOKS
        world.policy.token_s = 0.05
        world.host(world.policy)
        world.host_worker(num_concurrent=6, acquire_wait_s=600.0, num_machines_max=50)
        number = 0
        for kill in range(num_kills):
            host = world.host_machines(name=f"host-{kill}")
            await world.publish(make_command(f"g{number}-m0", make_task("train-0")))
            number += 1
            await world.sleep(0.5 + (kill % 7) * 0.3)
            await host.kill()
        world.host_machines(name="host-last")
        for rollout in await world.wait_for(RolloutFinished, number, within_s=5_000.0):
            assert rollout.end in {EpisodeEnd.FINISHED, EpisodeEnd.INFRASTRUCTURE_ERROR}

    simulate(scenario)
