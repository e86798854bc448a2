"""A repository's fixes become tasks: made, gated, shown to an agent and graded in machines."""

import json
import subprocess
from contextlib import asynccontextmanager

import pytest

from penstock.envs.backends import open_backend
from penstock.envs.factory.lab import MachineLab
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.sandbox import BackendUnavailable
from penstock.envs.tasks.changes import Changes
from penstock.envs.tasks.gates import check_candidate
from penstock.envs.tasks.readers.opening import read_tasks
from penstock.envs.tasks.workspace import open_workspace
from penstock.infra.cli import main

pytestmark = [pytest.mark.vm, pytest.mark.timeout(300)]
BEFORE = "def half(n):\n    return n / 2\n"
AFTER = "def half(n):\n    return n // 2\n"
TESTS = (
    "import unittest\nfrom m import half\n\n\nclass HalfTest(unittest.TestCase):\n"
    "    def test_odd(self):\n        self.assertEqual(half(3), 1)\n\n"
    "    def test_even(self):\n        self.assertEqual(half(4), 2)\n"
)
SECRET = "def third(n):\n    return n // 3\n"


@pytest.fixture(autouse=True)
def _machines():
    try:
        open_backend("uml")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(
        ["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A history: a start, a fix with its tests, a later commit, a tag and a remote."""
    folder = tmp_path / "halves"
    (folder / "tests").mkdir(parents=True)
    git(tmp_path, "init", "-q", "-b", "main", str(folder))
    for subject, path, text in [
        ("Start", "m.py", BEFORE),
        ("Round halves down", "m.py", AFTER),
        ("Add thirds", "later.py", SECRET),
    ]:
        (folder / path).write_text(text)
        if text == AFTER:
            (folder / "tests" / "test_m.py").write_text(TESTS)
        git(folder, "add", ".")
        git(folder, "commit", "-qm", subject)
    git(folder, "tag", "v1")
    git(folder, "remote", "add", "origin", "https://example.org/halves.git")
    return folder


@asynccontextmanager
async def machine():
    one = await open_backend("uml").start(timeout_s=60.0)
    try:
        yield one
    finally:
        await one.close()


def made(checkout, output, capsys):
    arguments = ["tasks", "make", str(checkout), "--commits", "-o", str(output), "--json"]
    assert main([*arguments, "--concurrent", "1"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_fix_becomes_a_gated_task_in_harbor_s_format(checkout, tmp_path, capsys):
    counts = made(checkout, tmp_path / "set", capsys)
    assert (counts["num_tasks"], counts["by_kind"]) == (1, {"commit": 1})
    (candidate,) = read_tasks(tmp_path / "set")
    assert candidate.task.instruction.startswith("Round halves down")
    assert candidate.task.files == {"m.py": BEFORE}
    assert candidate.hidden.gold_files == {"m.py": AFTER}
    assert candidate.hidden.files["/tests/apart/tree/tests/test_m.py"] == TESTS
    assert (candidate.origin.num_cases_failed, candidate.origin.num_cases) == (1, 2)
    assert main(["tasks", "check", str(tmp_path / "set"), "--json"]) == 0
    checked = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert checked == {"num_tasks": 1, "rejected": {}}


async def test_the_agent_s_repository_has_no_later_commit(checkout):
    from penstock.envs.factory.commit_tasks import CommitSource

    async with Pool(open_backend("uml"), size=1, live_max=2) as pool:
        (plan,) = CommitSource(checkout).plans()
        (candidate,) = await plan.draft(MachineLab(pool))
        await check_candidate(candidate, MachineLab(pool).grade, repeats=1)
    later = git(checkout, "rev-parse", "HEAD")
    fix = git(checkout, "rev-parse", "HEAD~1")
    script = (
        "git log --all --format=%s; git reflog 2>&1; git tag; git remote; git branch --all; "
        f"for one in {later} {fix}; do git cat-file -e $one 2>/dev/null && echo FOUND; done; "
        "git fsck --unreachable --no-progress; ls; grep -rlsE 'third|n // 2' /work /home; echo end"
    )
    async with machine() as sandbox:
        await open_workspace(sandbox, candidate.task, "r", has_git=True)
        said = await sandbox.exec(["sh", "-c", script], timeout_s=60.0)
    assert said.stdout.decode().split("\n") == ["Start of the task", "* main", "m.py", "end", ""]


@pytest.mark.slow
async def test_grading_tells_a_fix_from_none_and_from_a_wrong_one(checkout):
    from penstock.envs.factory.commit_tasks import CommitSource

    async with Pool(open_backend("uml"), size=1, live_max=2) as pool:
        lab = MachineLab(pool)
        (plan,) = CommitSource(checkout).plans()
        (candidate,) = await plan.draft(lab)
        task, hidden = candidate.task, candidate.hidden
        solved = [
            (await lab.grade(task, hidden, Changes(files=changes))).is_solved
            for changes in (
                {},
                {"m.py": AFTER.encode()},
                {"m.py": AFTER.encode() + b"import os; os._exit(0)\n"},
            )
        ]
    assert solved == [False, True, False]
