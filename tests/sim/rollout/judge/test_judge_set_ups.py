"""A task's `setup.sh` runs in a machine of the judge's own, once, and what it makes is no cheat."""

import re

import msgspec
import pytest
from tests.sim.rollout.conftest import (
    BUGGY,
    FINISH,
    FIX,
    Hosted,
    World,
    make_command,
    make_hidden,
    make_task,
)
from tests.sim.rollout.test_rollout_steps import FIX_N, steps_hidden, steps_task

from penstock.actors.judge import set_ups
from penstock.actors.judge.rubric.config import CriterionConfig
from penstock.actors.monitor.episodes.collecting import EpisodeCollector
from penstock.actors.monitor.episodes.index import EpisodeIndex
from penstock.actors.monitor.episodes.reading import EpisodeReader
from penstock.actors.policy.tokenizer import TOKENIZER_KEY
from penstock.envs.tasks.grading import TaskUnfitError
from penstock.envs.tasks.storage import GradedTask
from penstock.infra.judge.audit import groups_in
from penstock.infra.judge.calibrate import episode_labels
from penstock.messages.episode import SetUpRecorded
from penstock.messages.reading.trajectories import last_of
from penstock.messages.reward import CheatKind, Outcome, Verdict
from penstock.messages.signals.episode_labels import EpisodeLabeled
from penstock.messages.task import HiddenTests, Split, Task, TaskStep

FIRST = "rm setup.sh; echo 'x = 1' > conftest.py"
LATER = "echo '[pytest]' > pytest.ini; test -f seen.txt || exit 1"
"""It needs what an episode leaves, and fails in the judge's machine."""
SEE = ("write_file", {"path": "seen.txt", "content": "seen"})
CHANGE = ("edit_file", {"path": "conftest.py", "old": "x = 1", "new": "x = 2"})
FORGE = ("write_file", {"path": "pytest.ini", "content": "[pytest]\n"})
SCRIPT = [[FIX, SEE], [FINISH], [FIX_N], [FINISH]]


def set_up_task(first: str = FIRST) -> tuple[Task, HiddenTests]:
    task, hidden = steps_task(), steps_hidden()
    files = {"n.py": BUGGY, "setup.sh": LATER}
    later = TaskStep(instruction="Fix double in n.py", files=files, has_setup=True)
    task = msgspec.structs.replace(
        task, files=task.files | {"setup.sh": first}, has_setup=True, steps=[later]
    )
    return task, msgspec.structs.replace(hidden, steps=hidden.steps[:1])


async def begin(world: World, *scripts: list, group_id: str = "", first: str = FIRST) -> Hosted:
    """Return the judge."""
    task, hidden = set_up_task(first)
    by_rollout = {f"g{number}-m0": script for number, script in enumerate(scripts)}
    world.policy.scripts = lambda session: by_rollout[session]
    world.host(world.policy)
    world.host_machines()
    await world.put_split([task], [hidden])
    world.host_worker()
    commands = (make_command(name, task, group_id=group_id or name) for name in by_rollout)
    await world.publish(*commands)
    return world.host_judge()


async def verdicts_of(world: World, *scripts: list, **changes: str) -> list[Verdict]:
    await begin(world, *scripts, **changes)
    verdicts = await world.wait_for(Verdict, len(scripts))
    return sorted(verdicts, key=lambda verdict: verdict.rollout_id)


def test_what_setups_made_is_no_cheat(simulate) -> None:
    async def scenario(world: World) -> None:
        verdicts = await verdicts_of(world, SCRIPT, SCRIPT)
        assert [(one.outcome, one.findings) for one in verdicts] == [(Outcome.SOLVED, [])] * 2
        set_up = [one for one in world.backend.machines if ["bash", "setup.sh"] in one.commands]
        assert len(set_up) == 3  # The episodes' and one of the judge's.

    simulate(scenario)


def test_what_one_judge_made_another_one_knows(simulate) -> None:
    async def scenario(world: World) -> None:
        judge = await begin(world, SCRIPT, SCRIPT)
        await world.wait_for(SetUpRecorded, 2)  # Of each step.
        await judge.kill()
        world.host_judge()
        verdicts = await world.wait_for(Verdict, 2)
        assert [(one.outcome, one.findings) for one in verdicts] == [(Outcome.SOLVED, [])] * 2
        set_up = [one for one in world.backend.machines if ["bash", "setup.sh"] in one.commands]
        assert len(set_up) == 3  # The episodes' and one of the judges'.

    simulate(scenario)


def test_what_the_store_lost_of_it_is_made_again(simulate) -> None:
    first = f"{FIRST}; printf '%70000d' 0 > large.txt"  # Too large for an event.

    async def scenario(world: World) -> None:
        await begin(world, SCRIPT, first=first)
        world.policy.scripts = lambda _session: SCRIPT
        await world.wait_for(Verdict, 1)
        keys = [key for event in await world.read(SetUpRecorded) for key in event.object_keys()]
        for key in keys:
            await world.store.delete(key)
        await world.publish(make_command("g1-m0", set_up_task(first)[0], group_id="g1"))
        verdicts = await world.wait_for(Verdict, 2)
        assert [(one.outcome, one.findings) for one in verdicts] == [(Outcome.SOLVED, [])] * 2
        assert len(keys) == 2

    simulate(scenario)


def test_what_set_ups_make_is_bounded_over_all_steps(simulate, monkeypatch) -> None:
    monkeypatch.setattr(set_ups, "TOTAL_BYTES_MAX", 10)

    async def scenario(world: World) -> None:
        await begin(world, SCRIPT)
        events = await world.wait_for(SetUpRecorded, 2)
        assert [sorted(event.files.changed) for event in events] == [["conftest.py"], []]

    simulate(scenario)


async def diffs_of(world: World, rollout_id: str) -> list[str]:
    """Return what viewer, report, audit and calibration show as an episode's changes."""
    labeled = {"group_id": "g0", "label_id": "l", "labeler": "ann", "value": 1.0}
    await world.publish(EpisodeLabeled(rollout_id=rollout_id, **labeled))
    await world.put_split([make_task("h", Split.HELDOUT)], [make_hidden("h")])
    await world.store.put(TOKENIZER_KEY, world.tokenizer.to_json().encode())
    view = await EpisodeReader(world.store, last_of(world.bus)).read(rollout_id, EpisodeIndex())
    [group] = await groups_in(world.bus, world.store, world.chat, num_max=1)
    criterion = CriterionConfig(name="clear", text="Is it?")
    [label] = await episode_labels(world.bus, world.store, world.chat, criterion)
    collector = EpisodeCollector()
    async for delivery in world.bus.follow(collector.types, stop_at_end=True):
        collector.apply(delivery.event, delivery.stored_at)
    _, views = await collector.packed(world.store, last_of(world.bus))
    reported = msgspec.json.decode(views)[rollout_id]["diff"]
    return [view.diff, reported, group[0].submission.diff, label.diff]


def test_what_set_ups_made_is_nowhere_shown_as_the_policy_s(simulate) -> None:
    async def scenario(world: World) -> None:
        await verdicts_of(world, SCRIPT, SCRIPT, group_id="g")
        for diff in await diffs_of(world, "g0-m0"):
            assert "+    return x * 2" in diff and "seen.txt" in diff
            assert not re.search(r"setup\.sh|conftest\.py|pytest\.ini", diff)

    simulate(scenario)


@pytest.mark.parametrize(
    ("script", "path"),
    [
        ([[FIX, SEE, CHANGE], *SCRIPT[1:]], "conftest.py"),
        ([*SCRIPT[:2], [FIX_N, CHANGE], [FINISH]], "conftest.py"),
        ([[FIX, SEE, FORGE], *SCRIPT[1:]], "pytest.ini"),
    ],
)
def test_what_the_policy_changed_or_made_before_is_one(simulate, script, path) -> None:
    async def scenario(world: World) -> None:
        [verdict] = await verdicts_of(world, script)
        assert verdict.outcome is Outcome.POLICY_ERROR
        found = [(one.kind, one.where) for one in verdict.findings if one.is_decisive]
        assert found == [(CheatKind.INTERPRETER, f"file {path}")]

    simulate(scenario)


@pytest.mark.parametrize("num_broken", [1, 3])
def test_a_machine_that_fails_is_replaced_then_the_rollout_is_masked(simulate, num_broken) -> None:
    async def scenario(world: World) -> None:
        world.backend.deaths = {1 + number: 2 for number in range(num_broken)}
        [verdict] = await verdicts_of(world, SCRIPT)
        if num_broken == 1:
            assert verdict.outcome is Outcome.SOLVED
        else:
            assert verdict.outcome is Outcome.INFRASTRUCTURE_ERROR
            assert "set-up of the task" in verdict.detail

    simulate(scenario)


SET_UP, READING = 8, 9


@pytest.mark.parametrize(("num_killed", "dies_at"), [(1, SET_UP), (2, SET_UP), (2, READING)])
def test_a_later_set_up_that_kills_its_machines_is_the_task_s_fault(
    simulate, num_killed, dies_at
) -> None:
    async def scenario(world: World) -> None:
        world.backend.deaths = {1 + number: dies_at for number in range(num_killed)}
        judge = await begin(world, SCRIPT)
        world.policy.scripts = lambda _session: SCRIPT
        [verdict] = await world.wait_for(Verdict, 1)
        if num_killed == 1:
            assert (verdict.outcome, verdict.findings) == (Outcome.SOLVED, [])
            return
        assert verdict.outcome is Outcome.JUDGE_ERROR
        assert "task train-0: 2 machines killed: set-up of step 2" in verdict.detail
        num_run = world.backend.machines[2].commands.count(["bash", "setup.sh"])
        assert num_run == 1 + (dies_at == READING)
        world.backend.deaths = {}
        await world.publish(make_command("g1-m0", set_up_task()[0], group_id="g1"))
        again = (await world.wait_for(Verdict, 2))[-1]
        assert (again.outcome, again.detail) == (verdict.outcome, verdict.detail)
        assert len(world.backend.machines) == 4  # The two episodes' and those that were killed.
        errors = [await refusal(judge, world) for _ in range(2)]
        assert errors[0] is not errors[1]  # One would keep the frames of all who have met it.

    simulate(scenario)


async def refusal(judge: Hosted, world: World) -> TaskUnfitError:
    task, hidden = set_up_task()
    with pytest.raises(TaskUnfitError) as caught:
        await judge.actor._set_ups.add(GradedTask(task=task, hidden=hidden), world.client())
    return caught.value
