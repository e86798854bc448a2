"""Verdicts over the bus: graded in a fresh machine, masked where machines fail."""

import msgspec
import pytest
from tests.sim.rollout.conftest import BUGGY, FIXED, World, make_hidden, make_task

from penstock.actors.judge.actor import JudgeActor
from penstock.actors.judge.config import JudgeConfig
from penstock.messages.base import Claim
from penstock.messages.codec import encode
from penstock.messages.control import MessageRejected
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import EpisodeEnd, EpisodeFiles, RolloutFinished, TurnSummary
from penstock.messages.sandbox import AcquireSandbox
from penstock.messages.task import Purpose


def make_rollout(rollout_id: str = "g0-m0", **changes: object) -> RolloutFinished:
    fields: dict = {
        "rollout_id": rollout_id, "group_id": "g0", "group_index": 0, "group_size": 1, "member": 0,
        "purpose": Purpose.TRAIN, "task_id": "train-0", "category": "operator",
        "end": EpisodeEnd.FINISHED, "turns": [], "files": {"m.py": FIXED.encode()},
    }  # fmt: skip
    fields |= changes
    fields["files"] = EpisodeFiles(changed=fields["files"])
    return RolloutFinished(**fields)


async def judge_one(world: World, rollout: RolloutFinished, **settings: object) -> Verdict:
    await world.put_tasks()
    world.host_machines()
    world.host_judge(**settings)
    await world.publish(rollout)
    [verdict] = await world.wait_for(Verdict, 1)
    assert verdict.reward == pytest.approx(sum(verdict.components.values()))
    return verdict


def test_a_fixed_file_passes_the_hidden_tests_of_a_fresh_machine(simulate) -> None:
    async def scenario(world: World) -> None:
        verdict = await judge_one(world, make_rollout())
        assert verdict.outcome is Outcome.SOLVED
        assert (verdict.num_tests_passed, verdict.num_tests) == (2, 2)
        assert verdict.components["tests"] == 1.0
        assert verdict.sandbox is not None
        assert (verdict.judge, verdict.category) == ("hidden_tests", "operator")
        [machine] = world.backend.machines
        assert not machine.alive

    simulate(scenario)


def test_a_judge_does_not_wait_for_a_dead_ones_lease(simulate) -> None:
    async def scenario(world: World) -> None:
        await world.put_tasks()
        world.host_machines(live_max=1)
        left = AcquireSandbox(lease_id="left", holder="judge.g0-m0", lease_s=60.0)
        await world.client().request("sandbox.acquire", left, deadline_s=5.0)
        began_s = world.client().monotonic()
        world.host_judge()
        await world.publish(make_rollout())
        [verdict] = await world.wait_for(Verdict, 1)
        assert verdict.outcome is Outcome.SOLVED
        assert world.client().monotonic() - began_s < 10.0

    simulate(scenario)


def test_deleted_files_are_not_there_when_graded(simulate) -> None:
    async def scenario(world: World) -> None:
        verdict = await judge_one(world, make_rollout(deleted=["other.py"]))
        assert verdict.outcome is Outcome.SOLVED
        assert sorted(world.backend.machines[0].files) == ["_hidden.py", "m.py"]

    simulate(scenario)


def test_a_tests_visible_copy_is_replaced_by_the_hidden_one(simulate) -> None:
    async def scenario(world: World) -> None:
        task = make_task("train-0")
        task.files["_hidden.py"] = "print('0')\n"
        await world.put_split([task], [make_hidden("train-0")])
        world.host_machines()
        world.host_judge()
        files = {"m.py": BUGGY.encode(), "_hidden.py": b"print('4\\n6')\n"}
        await world.publish(make_rollout(files=files))
        [verdict] = await world.wait_for(Verdict, 1)
        assert (verdict.outcome, verdict.num_tests) == (Outcome.FAILED, 2)

    simulate(scenario)


@pytest.mark.parametrize("files", [{}, {"m.py": FIXED.encode()}], ids=["unchanged", "fixed"])
def test_hidden_tests_that_do_not_parse_are_the_judges_error(simulate, files) -> None:
    async def scenario(world: World) -> None:
        hidden = msgspec.structs.replace(make_hidden("train-0"), files={"_hidden.py": "def ("})
        await world.put_split([make_task("train-0")], [hidden])
        world.host_machines()
        world.host_judge()
        await world.publish(make_rollout(files=files))
        [verdict] = await world.wait_for(Verdict, 1)
        assert verdict.outcome is Outcome.JUDGE_ERROR
        assert "train-0" in verdict.detail
        assert "_hidden.py does not parse" in verdict.detail

    simulate(scenario)


def test_held_out_tasks_are_found_by_purpose(simulate) -> None:
    async def scenario(world: World) -> None:
        rollout = make_rollout("ev0-0", purpose=Purpose.EVAL, task_id="heldout-1")
        assert (await judge_one(world, rollout)).outcome is Outcome.SOLVED

    simulate(scenario)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"files": {"m.py": b"def double(x):\n    return 4\n"}}, (Outcome.FAILED, 1)),
        ({"files": {"m.py": b"def double(x:\n"}}, (Outcome.FAILED, 0)),
        ({"files": {"m.py": b"raise SystemExit(0)\n"}}, (Outcome.FAILED, 0)),
        ({"files": {"m.py": b"print('4')\nraise ValueError\n"}}, (Outcome.FAILED, 0)),
        ({"files": {"_hidden.py": b"print('4\\n6')\n"}}, (Outcome.POLICY_ERROR, 0)),
        ({"files": {}, "deleted": ["m.py"]}, (Outcome.FAILED, 0)),
        ({"files": {}}, (Outcome.FAILED, 0)),
        ({"end": EpisodeEnd.TURN_LIMIT}, (Outcome.SOLVED, 2)),
        ({"end": EpisodeEnd.TIME_LIMIT}, (Outcome.TIMEOUT, 0)),
        ({"end": EpisodeEnd.POLICY_ERROR}, (Outcome.POLICY_ERROR, 0)),
        ({"end": EpisodeEnd.INFRASTRUCTURE_ERROR}, (Outcome.INFRASTRUCTURE_ERROR, 0)),
        ({"end": EpisodeEnd.CANCELLED}, (Outcome.CANCELLED, 0)),
        ({"task_id": "stranger"}, (Outcome.JUDGE_ERROR, 0)),
    ],
)
def test_outcomes(simulate, changes: dict, expected: tuple[Outcome, int]) -> None:
    async def scenario(world: World) -> None:
        verdict = await judge_one(world, make_rollout(**changes))
        assert (verdict.outcome, verdict.num_tests_passed) == expected
        assert (verdict.components == {}) == verdict.outcome.is_masked

    simulate(scenario)


def test_an_unchanged_repository_needs_no_machine_and_the_verdict_says_why(simulate) -> None:
    async def scenario(world: World) -> None:
        verdict = await judge_one(world, make_rollout(files={}))
        assert verdict.outcome is Outcome.FAILED
        assert "known to fail" in verdict.detail
        assert world.backend.machines == []

    simulate(scenario)


def test_a_lost_machine_is_replaced(simulate) -> None:
    async def scenario(world: World) -> None:
        world.backend.deaths[0] = 3
        assert (await judge_one(world, make_rollout())).outcome is Outcome.SOLVED
        assert len(world.backend.machines) == 2

    simulate(scenario)


def test_machines_that_all_die_mask_the_rollout(simulate) -> None:
    async def scenario(world: World) -> None:
        world.backend.deaths[-1] = 2
        verdict = await judge_one(world, make_rollout(), num_attempts_max=2)
        assert verdict.outcome is Outcome.INFRASTRUCTURE_ERROR
        assert verdict.components == {}
        assert "killed by the test" in verdict.detail
        assert len(world.backend.machines) == 2

    simulate(scenario)


def test_no_machine_at_all_masks_the_rollout(simulate) -> None:
    async def scenario(world: World) -> None:
        await world.put_tasks()
        world.host_judge(acquire_wait_s=3.0)
        await world.publish(make_rollout())
        [verdict] = await world.wait_for(Verdict, 1)
        assert verdict.outcome is Outcome.INFRASTRUCTURE_ERROR

    simulate(scenario)


def test_a_killed_judge_gives_one_verdict(simulate) -> None:
    async def scenario(world: World) -> None:
        await world.put_tasks()
        world.backend.delay_s = 0.3
        world.host_machines()
        judge = world.host_judge()
        await world.publish(make_rollout())
        await world.sleep(0.5)
        await judge.kill()
        world.host_judge()
        [verdict] = await world.wait_for(Verdict, 1)
        assert verdict.outcome is Outcome.SOLVED
        await world.sleep(120.0)
        assert len(await world.read(Verdict)) == 1

    simulate(scenario)


def test_a_rollout_whose_turns_or_files_are_gone_is_masked_with_the_cause(simulate) -> None:
    async def scenario(world: World) -> None:
        named = TurnSummary(num_context=3, num_sampled=2, version_spans=[])
        unread = Claim(object_key="claims/1-gone", num_bytes=1, blake3="0" * 64)
        await world.put_tasks()
        world.host_machines()
        world.host_judge()
        rollouts = [make_rollout("g0-m0", turns=[named]), make_rollout("g0-m1")]
        await world.publish(rollouts[0], msgspec.structs.replace(rollouts[1], files=unread))
        verdicts = await world.wait_for(Verdict, 2)
        assert {one.outcome for one in verdicts} == {Outcome.JUDGE_ERROR}
        details = {one.rollout_id: one.detail for one in verdicts}
        assert "g0-m0.0: missing from the log" in details["g0-m0"]
        assert "claims/1-gone" in details["g0-m1"]

    simulate(scenario)


@pytest.mark.parametrize("actor", ["judge", "sandbox+judge"])
def test_a_rejected_rollout_is_masked(simulate, actor) -> None:
    async def scenario(world: World) -> None:
        await world.put_tasks()
        rejected = MessageRejected(
            source_stream="trajectories",
            source_sequence=1,
            source_subject="x",
            actor=actor,
            cause="too bad",
            data=encode(make_rollout()),
        )
        world.host(JudgeActor(world.chat, JudgeConfig()), "judge")
        await world.publish(rejected)
        [verdict] = await world.wait_for(Verdict, 1)
        assert verdict.outcome is Outcome.JUDGE_ERROR
        assert "too bad" in verdict.detail

    simulate(scenario)
