"""A Harbor task of several steps in real machines: files, setup, each step's tests and solution."""

import msgspec
import pytest
from tests.contract.test_tasks_harbor_vm import graded, pool, write  # noqa: F401

from penstock.actors.judge.set_ups import run_set_ups
from penstock.envs.factory.lab import MachineLab
from penstock.envs.tasks.gates import check_candidate
from penstock.envs.tasks.source import TaskRejectedError
from penstock.envs.tasks.storage import GradedTask
from penstock.envs.tasks.workspace import SetupError, open_step, open_workspace
from penstock.messages.reward import Outcome

pytestmark = [pytest.mark.vm, pytest.mark.timeout(300)]
FILES = {
    "task.toml": """\
schema_version = "1.4"
multi_step_reward_strategy = "final"
[verifier]
timeout_sec = 60.0
env = { WANTED = "one" }
[[steps]]
name = "first"
min_reward = 1.0
[[steps]]
name = "the second"
[steps.verifier]
env = { WANTED = "two" }
""",
    "tests/wanted.sh": '[ "$(cat /app/said)" = "$WANTED" ] && echo 1 > /logs/verifier/reward.txt',
    "steps/first/instruction.md": "Say one.\n",
    "steps/first/tests/test.sh": "bash /tests/wanted.sh\n",
    "steps/first/workdir/setup.sh": "echo made > made.txt\n",
    "steps/first/solution/solve.sh": "echo one > /app/said\n",
    "steps/the second/instruction.md": "Say two, by count.txt.\n",
    "steps/the second/tests/test.sh": "[ -f /app/counted ] && bash /tests/wanted.sh\n",
    "steps/the second/workdir/count.txt": "two\n",
    "steps/the second/workdir/setup.sh": "test -f said && cp count.txt counted\n",
    "steps/the second/solution/solve.sh": "grep -q one /app/said && cat counted > /app/said\n",
}  # fmt: skip


def make(folder, **changed):
    candidate = write(folder, **(FILES | changed))
    return candidate, GradedTask(task=candidate.task, hidden=candidate.hidden)


def steps_of(candidate, task):
    return [msgspec.structs.replace(candidate, task=one.task, hidden=one.hidden)
            for one in (task.at_step(0), task.at_step(1))]  # fmt: skip


async def test_each_step_is_graded_by_its_own_tests(pool, tmp_path):  # noqa: F811
    first, second = steps_of(*make(tmp_path / "steps"))
    said = {"said": b"one\n"}
    assert (await graded(pool, first, said)).outcome is Outcome.SOLVED
    assert (await graded(pool, second, said | {"counted": b""})).outcome is Outcome.FAILED
    left = {"said": b"two\n", "counted": b"two\n"}
    assert (await graded(pool, first, left)).outcome is Outcome.FAILED
    assert (await graded(pool, second, left)).outcome is Outcome.SOLVED


async def test_files_and_setup_of_a_step_are_there_when_it_is_asked(pool, tmp_path):  # noqa: F811
    candidate, _ = make(tmp_path / "steps")
    machine = (await pool.acquire(200.0)).sandbox
    await open_workspace(machine, candidate.task, "r", has_git=True)
    done = await machine.exec(["sh", "-c", "ls; git status --porcelain"], timeout_s=60.0)
    assert done.stdout.decode().split() == ["data", "greet.py", "made.txt", "setup.sh"]
    with pytest.raises(SetupError, match=r"setup\.sh: exit code 1"):
        await open_step(machine, candidate.task.steps[0])
    await machine.write_files({"said": b"one\n"})
    await open_step(machine, candidate.task.steps[0])
    assert await machine.read_file("counted", 99) == b"two\n"


async def test_what_setups_make_is_known_without_the_policy(pool, tmp_path):  # noqa: F811
    """The second one fails here, after it has made a file: nobody left `said`."""
    changed = {
        "steps/first/workdir/setup.sh": "rm setup.sh; echo made > made.txt\n",
        "steps/the second/workdir/setup.sh": "echo > conftest.py; test -f said && echo > too.txt\n",
    }
    candidate, _ = make(tmp_path / "steps", **changed)
    machine = (await pool.acquire(200.0)).sandbox
    first, later = await run_set_ups(machine, candidate.task)
    assert (first.files, first.deleted) == ({"made.txt": b"made\n"}, ["setup.sh"])
    assert later.files == {"made.txt": b"made\n", "conftest.py": b"\n"} and not later.deleted


async def test_the_gates_go_through_all_steps(pool, tmp_path):  # noqa: F811
    lab = MachineLab(pool)
    candidate, _ = make(tmp_path / "steps")
    await check_candidate(candidate, lab.grade, repeats=1, solve=lab.solve)
    wrong, _ = make(tmp_path / "wrong", **{"steps/first/solution/solve.sh": "echo 1 > /app/said"})
    with pytest.raises(TaskRejectedError, match="0 of 2 tests pass"):
        await check_candidate(wrong, lab.grade, repeats=1, solve=lab.solve)
