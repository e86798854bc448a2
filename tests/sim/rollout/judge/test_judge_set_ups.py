"""A task's `setup.sh` runs in a machine of the judge's own, once, and what it makes is no cheat."""

import msgspec
import pytest
from tests.sim.rollout.conftest import BUGGY, FINISH, FIX, World, make_command
from tests.sim.rollout.test_rollout_steps import FIX_N, steps_hidden, steps_task

from penstock.actors.judge import set_ups
from penstock.messages.reward import CheatKind, Outcome, Verdict
from penstock.messages.task import HiddenTests, Task, TaskStep

FIRST = "rm setup.sh; echo 'x = 1' > conftest.py"
LATER = "echo '[pytest]' > pytest.ini; test -f seen.txt || exit 1"
"""It needs what an episode leaves, and fails in the judge's machine."""
SEE = ("write_file", {"path": "seen.txt", "content": "seen"})
CHANGE = ("edit_file", {"path": "conftest.py", "old": "x = 1", "new": "x = 2"})
FORGE = ("write_file", {"path": "pytest.ini", "content": "[pytest]\n"})
SCRIPT = [[FIX, SEE], [FINISH], [FIX_N], [FINISH]]


def set_up_task() -> tuple[Task, HiddenTests]:
    task, hidden = steps_task(), steps_hidden()
    files = {"n.py": BUGGY, "setup.sh": LATER}
    later = TaskStep(instruction="Fix double in n.py", files=files, has_setup=True)
    task = msgspec.structs.replace(
        task, files=task.files | {"setup.sh": FIRST}, has_setup=True, steps=[later]
    )
    return task, msgspec.structs.replace(hidden, steps=hidden.steps[:1])


async def verdicts_of(world: World, *scripts: list) -> list[Verdict]:
    task, hidden = set_up_task()
    by_rollout = {f"g{number}-m0": script for number, script in enumerate(scripts)}
    world.policy.scripts = lambda session: by_rollout[session]
    world.host(world.policy)
    world.host_machines()
    await world.put_split([task], [hidden])
    world.host_worker()
    world.host_judge()
    await world.publish(*(make_command(name, task, group_id=name) for name in by_rollout))
    verdicts = await world.wait_for(Verdict, len(scripts))
    return sorted(verdicts, key=lambda verdict: verdict.rollout_id)


def test_what_setups_made_is_no_cheat(simulate) -> None:
    async def scenario(world: World) -> None:
        verdicts = await verdicts_of(world, SCRIPT, SCRIPT)
        assert [(one.outcome, one.findings) for one in verdicts] == [(Outcome.SOLVED, [])] * 2
        set_up = [one for one in world.backend.machines if ["bash", "setup.sh"] in one.commands]
        assert len(set_up) == 3  # The episodes' and one of the judge's.

    simulate(scenario)


@pytest.mark.parametrize(("num_bytes_max", "num_made"), [(1 << 20, 2), (600, 3), (1, 3)])
def test_of_many_tasks_the_last_used_are_kept(
    simulate, monkeypatch, num_bytes_max, num_made
) -> None:
    monkeypatch.setattr(set_ups, "KEPT_BYTES_MAX", num_bytes_max)

    async def scenario(world: World) -> None:
        task, hidden = set_up_task()
        task, hidden = (msgspec.structs.replace(one, steps=[]) for one in (task, hidden))
        tasks = [msgspec.structs.replace(task, task_id=name) for name in ("a", "b")]
        hiddens = [msgspec.structs.replace(hidden, task_id=name) for name in ("a", "b")]
        world.policy.scripts = lambda _session: [[FIX], [FINISH]]
        world.host(world.policy)
        world.host_machines()
        await world.put_split(tasks, hiddens)
        world.host_worker()
        world.host_judge()
        for number, which in enumerate((0, 1, 0)):
            await world.publish(make_command(f"g{number}", tasks[which], group_id=f"g{number}"))
            verdicts = await world.wait_for(Verdict, number + 1)
            assert (verdicts[-1].outcome, verdicts[-1].findings) == (Outcome.SOLVED, [])
        set_up = [one for one in world.backend.machines if ["bash", "setup.sh"] in one.commands]
        assert len(set_up) == 3 + num_made  # The episodes' and the judge's.

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
            assert "the task's set-up" in verdict.detail

    simulate(scenario)
