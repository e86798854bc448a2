"""A policy at work on a task of several steps, and stored objects that do not fit one."""

import msgspec
import pytest
from tests.redteam.policy.test_ends import refuse
from tests.sim.rollout.conftest import FINISH, FIX, LOOK, World, simulate, tokenizer
from tests.sim.rollout.test_rollout_steps import (
    CALLS,
    FIX_N,
    start,
    steps_hidden,
    verdict_of,
)

from penstock.messages.reward import CheatKind, Outcome
from penstock.messages.rollout import EpisodeEnd, RolloutFinished
from penstock.messages.rpc import RemoteErrorKind

__all__ = ["simulate", "tokenizer"]
NAMES_VERIFIER = ("edit_file", {"path": "m.py", "old": "x + 1", "new": "x + 1  # /tests/test.sh"})
CLEANS_UP = ("edit_file", {"path": "m.py", "old": "  # /tests/test.sh", "new": ""})


@pytest.mark.parametrize("calls", [[[], [], []], [[FINISH]] * 3, [[FINISH], []]])
def test_ending_steps_without_work_earns_nothing(simulate, calls) -> None:
    async def scenario(world: World) -> None:
        second, third = steps_hidden().steps
        third = msgspec.structs.replace(third, expected=["9", "9"])
        task = await start(world, msgspec.structs.replace(steps_hidden(), steps=[second, third]))
        world.policy.scripts = lambda _session: calls
        verdict = await verdict_of(world, task)
        [rollout] = await world.read(RolloutFinished)
        assert rollout.end is EpisodeEnd.FINISHED and len(rollout.step_ends) == 2
        assert (verdict.outcome, verdict.reward) == (Outcome.FAILED, 0.0)
        assert verdict.num_tests == 3 and not verdict.outcome.is_masked

    simulate(scenario)


def test_what_gave_a_policy_away_in_one_step_is_not_forgotten_in_the_next(simulate) -> None:
    """The first step's file names the verifier's; the second step takes that out and is right."""

    async def scenario(world: World) -> None:
        task = await start(world)
        world.policy.scripts = lambda _session: [
            [NAMES_VERIFIER], [FINISH], [CLEANS_UP], [FIX_N], [FINISH], [FINISH]
        ]  # fmt: skip
        verdict = await verdict_of(world, task)
        assert verdict.outcome is Outcome.POLICY_ERROR
        assert [(one.kind, one.is_decisive) for one in verdict.findings] == [
            (CheatKind.HIDDEN_TESTS, True)
        ]
        assert "solved by cheating" in verdict.detail and verdict.reward <= 0.0

    simulate(scenario)


@pytest.mark.parametrize("num_hidden", [0, 1, 3])
def test_hidden_tests_of_other_steps_are_the_tasks_fault(simulate, num_hidden) -> None:
    async def scenario(world: World) -> None:
        hidden = steps_hidden()
        steps = [*hidden.steps, *hidden.steps][:num_hidden]
        task = await start(world, msgspec.structs.replace(hidden, steps=steps))
        verdict = await verdict_of(world, task)
        assert verdict.outcome is Outcome.JUDGE_ERROR
        words = f"expected hidden tests of 3 steps, got {num_hidden + 1}"
        assert f"task train-0: {words}" in verdict.detail

    simulate(scenario)


@pytest.mark.parametrize("dies_at", range(3, 20))
def test_a_machine_that_ends_at_any_operation_is_replaced(simulate, dies_at) -> None:
    async def scenario(world: World) -> None:
        task = await start(world)
        world.backend.deaths[0] = dies_at
        verdict = await verdict_of(world, task)
        [rollout] = await world.read(RolloutFinished)
        assert (rollout.end, rollout.step_ends) == (EpisodeEnd.FINISHED, [2, 4])
        assert verdict.outcome is Outcome.SOLVED

    simulate(scenario)


@pytest.mark.parametrize("dies_at", range(3, 20))
def test_machine_after_machine_that_a_policy_ends_in_a_step_is_its_fault(simulate, dies_at) -> None:
    """In its calls, when its files are read at a step's end, when the next step is laid out."""

    async def scenario(world: World) -> None:
        task = await start(world)
        world.backend.deaths[-1] = dies_at
        verdict = await verdict_of(world, task)
        [rollout] = await world.read(RolloutFinished)
        if rollout.end is not EpisodeEnd.FINISHED:
            assert rollout.end is EpisodeEnd.POLICY_ERROR
            assert "machines killed" in rollout.error
        assert not verdict.outcome.is_masked

    simulate(scenario)


def test_a_context_that_outgrows_the_engine_in_a_later_step_keeps_what_came_before(
    simulate,
) -> None:
    async def scenario(world: World) -> None:
        task = await start(world)
        world.policy.scripts = lambda _session: [[FIX], [FINISH], *[[LOOK, LOOK]] * 9]
        refuse(
            world,
            RemoteErrorKind.TOO_LONG,
            "token_ids: got {length} tokens, expected 1..{above}",
            300,
        )
        verdict = await verdict_of(world, task)
        [rollout] = await world.read(RolloutFinished)
        assert (rollout.end, rollout.step_ends) == (EpisodeEnd.TOKEN_LIMIT, [1])
        assert (verdict.outcome, verdict.num_tests_passed) == (Outcome.FAILED, 1)
        assert verdict.score == pytest.approx(1 / 3)

    simulate(scenario)


@pytest.mark.parametrize("num_turns_max", range(1, len(CALLS) + 1))
@pytest.mark.parametrize("num_tokens_max", [120, 10_000])
def test_the_chain_has_the_turns_and_tokens_of_one_episode(
    simulate, num_turns_max, num_tokens_max
) -> None:
    async def scenario(world: World) -> None:
        limits = {"num_turns_max": num_turns_max, "num_tokens_max": num_tokens_max}
        verdict = await verdict_of(world, await start(world, **limits))
        [rollout] = await world.read(RolloutFinished)
        assert 1 <= len(rollout.turns) <= num_turns_max
        num_tokens = sum(
            turn.context_ids.shape[0] + turn.token_ids.shape[0] for turn in rollout.turns
        )
        assert num_tokens <= num_tokens_max
        assert not verdict.outcome.is_masked

    simulate(scenario)
