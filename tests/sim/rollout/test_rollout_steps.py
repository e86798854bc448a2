"""Tasks of several steps: one machine and one conversation, each step graded by its own tests."""

import msgspec
import pytest
from tests.sim.rollout.conftest import (
    BUGGY,
    FINISH,
    FIX,
    FIXED,
    LOOK,
    World,
    make_command,
    make_hidden,
    make_task,
)
from tests.sim.rollout.saving import SavingBackend
from tests.sim.rollout.test_rollout_episode import int32_list
from tests.sim.rollout.test_rollout_segments import SummingPolicy
from tests.sim.rollout.test_rollout_segments import settings as summary_settings
from tests.sim.rollout.test_rollout_tree import tree_command

from penstock.actors.judge.config import JudgeConfig
from penstock.actors.judge.judges import JUDGES
from penstock.actors.judge.reward import Findings
from penstock.actors.judge.submission import read_submission
from penstock.actors.judge.task_steps import HiddenTestsJudge
from penstock.actors.policy.summaries import SummaryMode
from penstock.actors.runtime.context import Context
from penstock.envs.tasks.storage import GradedTask
from penstock.messages.episode import EpisodeStepEnded
from penstock.messages.reading.trajectories import Trajectory
from penstock.messages.reward import Outcome, StepGraded, Verdict
from penstock.messages.rollout import EpisodeEnd, RolloutFinished, TurnSampled
from penstock.messages.task import HiddenTests, StartRollout, Task, TaskStep

FIX_N = ("edit_file", {"path": "n.py", "old": "x + 1", "new": "x * 2"})
BREAK = ("edit_file", {"path": "m.py", "old": "x * 2", "new": "x + 1"})
CALLS = [[LOOK], [FIX], [FINISH], [FIX_N], [], [BREAK], [FINISH]]
"""The three steps end with turns 2 (by the tool), 4 (by an answer) and 6."""
TESTS_N = "import n\nprint(n.double(2))\nprint(n.double(3))\n"


def steps_task(**limits: float) -> Task:
    later = [
        TaskStep(instruction="Fix double in n.py", files={"n.py": BUGGY}),
        TaskStep(instruction="Break m.py again"),
    ]
    task = make_task("train-0", **({"num_turns_max": 12} | limits))
    return msgspec.structs.replace(task, steps=later)


def steps_hidden(**changes: object) -> HiddenTests:
    first = make_hidden("train-0")
    second = msgspec.structs.replace(first, files={"_hidden.py": TESTS_N})
    third = msgspec.structs.replace(first, expected=["3", "4"])
    return msgspec.structs.replace(first, steps=[second, third], **changes)


async def start(
    world: World, hidden: HiddenTests | None = None, checkpoints: str = "", **limits: float
) -> Task:
    world.policy.scripts = lambda _session: CALLS
    world.host(world.policy)
    world.host_machines(checkpoints=checkpoints)
    task = steps_task(**limits)
    await world.put_split([task], [hidden or steps_hidden()])
    return task


async def verdict_of(world: World, task: Task) -> Verdict:
    world.host_worker()
    world.host_judge()
    await world.publish(make_command("g0-m0", task))
    [verdict] = await world.wait_for(Verdict, 1)
    await world.check_ledger()
    return verdict


async def left_by_steps(world: World) -> list[dict[str, bytes]]:
    ended = sorted(await world.read(EpisodeStepEnded), key=lambda event: event.step)
    assert [event.step for event in ended] == list(range(len(ended)))
    return [event.files.changed for event in ended]


def test_steps_follow_each_other_in_one_machine_and_conversation(simulate) -> None:
    async def scenario(world: World) -> None:
        verdict = await verdict_of(world, await start(world))
        [rollout] = await world.read(RolloutFinished)
        assert (rollout.end, rollout.step_ends) == (EpisodeEnd.FINISHED, [2, 4])
        asked = [world.tokenizer.decode(int32_list(turn.context_ids)) for turn in rollout.turns]
        told = ["Fix double in m.py", "Fix double in n.py", "Break m.py again"]
        assert [[n for n, text in enumerate(asked) if words in text] for words in told] == [
            [0], [3], [5]
        ]  # fmt: skip
        first, second = await left_by_steps(world)
        assert first == {"m.py": FIXED.encode()}
        assert second == {"m.py": FIXED.encode(), "n.py": FIXED.encode()}
        assert rollout.files == {"n.py": FIXED.encode()}
        assert (verdict.outcome, verdict.components["tests"]) == (Outcome.SOLVED, 1.0)
        assert (verdict.num_tests_passed, verdict.num_tests) == (3, 3)
        assert len(world.backend.machines) == 4  # The episode's and one for each step.
        whole = Trajectory(finished=rollout.event, turns=rollout.turns, files=rollout.files)
        graded = GradedTask(task=steps_task(), hidden=steps_hidden())
        submission = read_submission(whole, graded, world.chat)
        assert "-    return x + 1" in submission.diff
        assert submission.task == "\n\n".join(told)

    simulate(scenario)


class Strict:
    """An own judge: the hidden tests decide, as it asks them."""

    version = "1"

    def __init__(self, config: JudgeConfig) -> None:
        self._tests = HiddenTestsJudge(config)

    async def judge(self, rollout: Trajectory, task: GradedTask, ctx: Context) -> Findings:
        return await self._tests.judge(rollout, task, ctx)


class ByName(Strict):
    """The same, by the table."""

    def __init__(self, config: JudgeConfig) -> None:
        self._tests = JUDGES["hidden_tests"](config)


@pytest.mark.parametrize("own", [Strict, ByName])
def test_a_judge_that_asks_for_hidden_tests_has_all_steps_graded(simulate, own) -> None:
    async def scenario(world: World) -> None:
        task = await start(world)
        world.host_worker()
        world.host_judge(judge=f"{own.__module__}:{own.__name__}")
        await world.publish(make_command("g0-m0", task))
        [verdict] = await world.wait_for(Verdict, 1)
        assert (verdict.outcome, verdict.num_tests_passed) == (Outcome.SOLVED, 3)
        assert verdict.judge == f"{own.__module__}:{own.__name__}"
        assert len(await world.read(StepGraded)) == 3

    simulate(scenario)


def test_a_killed_judge_grades_no_step_twice(simulate) -> None:
    async def scenario(world: World) -> None:
        task = await start(world)
        world.host_worker()
        await world.publish(make_command("g0-m0", task))
        await world.wait_for(RolloutFinished, 1)
        for num_graded in (1, 2):
            judge = world.host_judge()
            await world.wait_for(StepGraded, num_graded)
            await judge.kill()
        world.host_judge()
        [verdict] = await world.wait_for(Verdict, 1)
        assert (verdict.outcome, verdict.num_tests_passed) == (Outcome.SOLVED, 3)
        graded = [one.commands for one in world.backend.machines[1:]]
        whole = [
            commands for commands in graded if ["python3", "-I", "-S", "_hidden.py"] in commands
        ]
        assert len(whole) == 3

    simulate(scenario)


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("num_turns", range(1, 7))
def test_a_killed_worker_resumes_in_its_step(simulate, tmp_path, saves, num_turns) -> None:
    async def scenario(world: World) -> None:
        world.policy.scripts, world.policy.token_s = lambda _session: CALLS, 0.05
        world.host(world.policy)
        world.backend = SavingBackend()
        world.host_machines(checkpoints=str(tmp_path / "saved"))
        worker = world.host_worker(checkpoint_turns=int(saves))
        await world.publish(make_command("g0-m0", steps_task()))
        await world.wait_for(TurnSampled, num_turns)
        await world.sleep(0.1)
        await worker.kill()
        world.host_worker(checkpoint_turns=int(saves))
        [rollout] = await world.wait_for(RolloutFinished, 1)
        await world.check_ledger()
        assert (rollout.end, rollout.step_ends) == (EpisodeEnd.FINISHED, [2, 4])
        assert len(rollout.turns) == len(CALLS)
        _, second = await left_by_steps(world)
        assert second == {"m.py": FIXED.encode(), "n.py": FIXED.encode()}
        assert rollout.files == {"n.py": FIXED.encode()}
        assert len(world.backend.copies) == saves

    simulate(scenario)


@pytest.mark.parametrize("is_forgetful", [False, True])
@pytest.mark.parametrize("trunk_turns", range(1, 6))
def test_branches_share_the_steps_of_their_trunk(
    simulate, tmp_path, trunk_turns, is_forgetful
) -> None:
    """Where saved machines hold nothing, each branch runs its trunk's calls again."""

    async def scenario(world: World) -> None:
        world.backend = SavingBackend()
        world.backend.is_forgetful = is_forgetful
        await start(world, checkpoints=str(tmp_path / "saved"))
        command = msgspec.structs.replace(
            tree_command(branches=3, trunk_turns=trunk_turns), task=steps_task()
        )
        await graded_tree(world, command)
        shared = sum(end < trunk_turns for end in (2, 4))
        assert len(await world.read(EpisodeStepEnded)) == shared + 3 * (2 - shared)

    simulate(scenario)


async def graded_tree(world: World, command: StartRollout) -> None:
    world.host_worker()
    world.host_judge()
    await world.publish(command)
    for rollout in await world.wait_for(RolloutFinished, 3):
        assert (rollout.step_ends, rollout.files) == ([2, 4], {"n.py": FIXED.encode()})
    verdicts = await world.wait_for(Verdict, 3)
    assert {verdict.outcome for verdict in verdicts} == {Outcome.SOLVED}
    await world.check_ledger()


@pytest.mark.parametrize(
    ("changes", "score"),
    [
        ({}, 2 / 3),
        ({"is_last_step_all": True}, 1.0),
        ({"min_reward": 0.5}, None),
        ({"min_reward": 0.0}, 2 / 3),
        ({"min_reward": 0.5, "is_last_step_all": True}, None),
    ],
)
def test_the_reward_is_of_the_steps_that_count(simulate, changes, score) -> None:
    """The first step fails here: the other two are right."""

    async def scenario(world: World) -> None:
        hidden = msgspec.structs.replace(steps_hidden(**changes), expected=["0", "0"])
        verdict = await verdict_of(world, await start(world, hidden))
        assert verdict.outcome is (Outcome.SOLVED if score == 1.0 else Outcome.FAILED)
        assert verdict.score == (None if score == 1.0 else pytest.approx(score))
        assert verdict.num_tests == (1 if score is None else 3)

    simulate(scenario)


@pytest.mark.parametrize(("is_last_step_all", "score"), [(False, 2 / 3), (True, None)])
def test_what_an_episode_did_not_reach_has_no_reward(simulate, is_last_step_all, score) -> None:
    async def scenario(world: World) -> None:
        hidden = steps_hidden(is_last_step_all=is_last_step_all)
        verdict = await verdict_of(world, await start(world, hidden, num_turns_max=4))
        [rollout] = await world.read(RolloutFinished)
        assert (rollout.end, rollout.step_ends) == (EpisodeEnd.TURN_LIMIT, [2])
        assert (verdict.outcome, verdict.num_tests_passed) == (Outcome.FAILED, 2)
        assert verdict.score == (None if score is None else pytest.approx(score))

    simulate(scenario)


def test_a_step_without_a_turn_has_no_reward(simulate) -> None:
    """Its tests would pass on the files as they are laid out."""

    async def scenario(world: World) -> None:
        hidden = steps_hidden()
        second = msgspec.structs.replace(hidden.steps[0], expected=["3", "4"])
        hidden = msgspec.structs.replace(hidden, steps=[second, hidden.steps[1]])
        verdict = await verdict_of(world, await start(world, hidden, num_turns_max=3))
        [rollout] = await world.read(RolloutFinished)
        assert (rollout.end, rollout.step_ends) == (EpisodeEnd.TURN_LIMIT, [2])
        assert (verdict.num_tests_passed, verdict.score) == (1, pytest.approx(1 / 3))

    simulate(scenario)


def test_a_setup_that_fails_on_what_was_left_is_the_policys_fault(simulate) -> None:
    async def scenario(world: World) -> None:
        task = await start(world)
        later = msgspec.structs.replace(task.steps[0], files={"setup.sh": "exit 1"}, has_setup=True)
        world.host_worker()
        steps = msgspec.structs.replace(task, steps=[later])
        first = msgspec.structs.replace(task, has_setup=True)
        await world.publish(make_command("g0-m0", steps), make_command("g1-m0", first))
        ends = {one.rollout_id: one for one in await world.wait_for(RolloutFinished, 2)}
        assert ends["g0-m0"].end is EpisodeEnd.POLICY_ERROR
        assert "setup.sh: exit code 1" in ends["g0-m0"].error
        assert ends["g1-m0"].end is EpisodeEnd.INFRASTRUCTURE_ERROR

    simulate(scenario)


@pytest.mark.parametrize("mode", [SummaryMode.TRAINED, SummaryMode.NONE])
def test_a_new_context_begins_with_the_instruction_of_its_step(simulate, mode) -> None:
    async def scenario(world: World) -> None:
        world.policy = SummingPolicy(world)
        world.policy.scripts = lambda _session: [*CALLS[:3], [LOOK], *CALLS[3:]]
        world.host(world.policy)
        world.host_machines()
        world.host_worker(**summary_settings(mode))
        limits = {"num_segments_max": 6, "num_turns_max": 20, "window_tokens_max": 150}
        await world.publish(make_command("g0-m0", steps_task(**limits)))
        [rollout] = await world.wait_for(RolloutFinished, 1)
        await world.check_ledger()
        assert rollout.end is EpisodeEnd.FINISHED and rollout.num_segments >= 3
        begun = [n for n, turn in enumerate(rollout.turns) if turn.starts_segment]
        words = ["Fix double in m.py", "Fix double in n.py", "Break m.py again"]
        for index in begun:
            step = sum(end < index for end in rollout.step_ends)
            text = world.tokenizer.decode(int32_list(rollout.turns[index].context_ids))
            assert [said in text for said in words] == [n == step for n in range(3)]
        assert any(index > rollout.step_ends[0] for index in begun)

    simulate(scenario)
