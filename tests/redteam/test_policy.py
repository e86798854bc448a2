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
            world, RemoteErrorKind.TOO_LONG, "token_ids: {length} long, expected 1..{above}", 150
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
        refuse(world, RemoteErrorKind.TOO_LONG, "token_ids: {length} long, expected 1..{above}", 3)
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
