"""Rollouts that leave the same files are graded once; another result, or a lost machine, is not."""

from tests.sim.rollout.conftest import BUGGY, FIXED, World
from tests.sim.rollout.judge.test_judge_actor import make_rollout

from penstock.envs.tasks.workspace import canary_token
from penstock.messages.base import Array
from penstock.messages.reward import CheatKind, Outcome, Verdict
from penstock.messages.rollout import StopReason, ToolCall, Turn, TurnSampled
from penstock.messages.task import Purpose

EMPTY = Array(dtype="int32", shape=(0,), data=b"")


async def verdicts_of(world: World, results: list[dict]) -> dict[str, Verdict]:
    await world.put_tasks()
    world.host_machines()
    world.host_judge(num_concurrent=4)
    for index, changes in enumerate(results):
        await world.publish(make_rollout(f"g0-m{index}", member=index, **changes))
    return {one.rollout_id: one for one in await world.wait_for(Verdict, len(results))}


def test_the_same_files_are_graded_in_one_machine(simulate) -> None:
    async def scenario(world: World) -> None:
        verdicts = await verdicts_of(world, [{}] * 6)
        assert {one.outcome for one in verdicts.values()} == {Outcome.SOLVED}
        assert len(world.backend.machines) == 1
        shared = [one for one in verdicts.values() if one.detail]
        [first] = [one for one in verdicts.values() if not one.detail]
        assert [one.detail for one in shared] == [f"same files as {first.rollout_id}"] * 5
        assert first.sandbox is not None
        assert all(one.sandbox is None for one in shared)

    simulate(scenario)


def test_other_files_other_tasks_and_deletions_are_graded_apart(simulate) -> None:
    async def scenario(world: World) -> None:
        results = [
            {},
            {"files": {"m.py": BUGGY.encode() + b"\n"}},
            {"files": {"m.py": FIXED.encode(), "note": b""}},
            {"deleted": ["other.py"]},
            {"task_id": "train-1"},
        ]
        verdicts = await verdicts_of(world, results)
        outcomes = [verdicts[f"g0-m{index}"].outcome for index in range(len(results))]
        assert outcomes == [Outcome.SOLVED, Outcome.FAILED, *[Outcome.SOLVED] * 3]
        assert len(world.backend.machines) == len(results)

    simulate(scenario)


def test_a_lost_machine_is_not_shared(simulate) -> None:
    async def scenario(world: World) -> None:
        world.backend.deaths.update(dict.fromkeys(range(3), 1))
        verdicts = await verdicts_of(world, [{}, {}])
        outcomes = sorted(one.outcome for one in verdicts.values())
        assert outcomes == sorted([Outcome.INFRASTRUCTURE_ERROR, Outcome.SOLVED])

    simulate(scenario)


def make_turn(command: str) -> Turn:
    return Turn(
        context_ids=EMPTY, token_ids=EMPTY, behavior_logprobs=EMPTY,
        version_spans=[], stop_reason=StopReason.STOP,
        calls=[ToolCall(name="run_terminal", arguments={"command": command})],
    )  # fmt: skip


def test_signs_of_cheating_are_an_episodes_own(simulate) -> None:
    async def scenario(world: World) -> None:
        turn = make_turn(f"echo {canary_token('g0-m1')}")
        await world.publish(
            TurnSampled(
                rollout_id="g0-m1", group_id="g0", purpose=Purpose.TRAIN, turn_index=0, turn=turn
            )
        )
        verdicts = await verdicts_of(world, [{}, {"turns": [turn.summary]}, {}])
        honest, cheat, other = (verdicts[f"g0-m{index}"] for index in range(3))
        assert cheat.outcome is Outcome.POLICY_ERROR
        assert [one.kind for one in cheat.findings] == [CheatKind.CANARY]
        assert (honest.outcome, other.outcome) == (Outcome.SOLVED, Outcome.SOLVED)
        assert honest.findings == other.findings == []

    simulate(scenario)
