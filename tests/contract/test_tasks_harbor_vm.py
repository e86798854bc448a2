"""A foreign Harbor task in real machines: its own verifier, its reward file, its hidden tests."""

import pytest
from tests.trajectories import trajectory

from penstock.actors.judge.hidden_tests import grade, touched_hidden_files
from penstock.envs.backends import open_backend
from penstock.envs.factory.lab import MachineLab
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.sandbox import BackendUnavailable
from penstock.envs.tasks.changes import read_changes
from penstock.envs.tasks.gates import check_candidate
from penstock.envs.tasks.harbor.read import read_harbor
from penstock.envs.tasks.harbor.write import write_harbor
from penstock.envs.tasks.source import TaskRejectedError
from penstock.envs.tasks.storage import GradedTask
from penstock.envs.tasks.workspace import open_workspace
from penstock.messages.reward import Outcome
from penstock.messages.rollout import EpisodeEnd
from penstock.messages.task import Purpose, Split

pytestmark = [pytest.mark.vm, pytest.mark.timeout(200)]
TASK_TOML = """\
schema_version = "1.3"
[task]
name = "example/greeting"
[verifier]
timeout_sec = 60.0
env = { WANTED = "hello" }
[agent]
timeout_sec = 90.0
"""
DOCKERFILE = """\
FROM python:3.13-slim
WORKDIR /app
COPY data/ ./data/
COPY --chown=1:1 greet.py .
"""
TEST = """\
#!/bin/bash
set -u
if [ "$PWD" = "/" ]; then exit 1; fi
mkdir -p /logs/verifier
python3 -m unittest discover -s /tests -p 'check_*.py'
if [ $? -eq 0 ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""
CHECK = """\
import os, pathlib, subprocess, unittest
class Check(unittest.TestCase):
    def test_greeting(self):
        said = subprocess.run(["python3", "/app/greet.py"], capture_output=True, text=True).stdout
        self.assertEqual(said.strip(), os.environ["WANTED"])
        self.assertEqual(pathlib.Path("/tests/wanted.txt").read_text().strip(), said.strip())
        self.assertTrue(pathlib.Path("/app/data/note.txt").is_file())
"""
FILES = {
    "task.toml": TASK_TOML,
    "instruction.md": "Make /app/greet.py say hello.\n",
    "environment/Dockerfile": DOCKERFILE,
    "environment/greet.py": "print('goodbye')\n",
    "environment/data/note.txt": "a note\n",
    "tests/test.sh": TEST,
    "tests/check_greeting.py": CHECK,
    "tests/wanted.txt": "hello\n",
    "solution/solve.sh": "#!/bin/bash\necho \"print('hello')\" > /app/greet.py\n",
}


def write(folder, **changed):
    for path, content in (FILES | changed).items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_harbor(folder)


@pytest.fixture
async def pool():
    try:
        backend = open_backend("uml")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    async with Pool(backend, size=0, live_max=4, boot_timeout_s=60.0) as machines:
        yield machines


async def graded(pool, candidate, files):
    """Grade what an episode left behind in a machine of its own."""
    rollout = trajectory(
        rollout_id="r", group_id="g", group_index=0, group_size=1, member=0,
        purpose=Purpose.TRAIN, task_id=candidate.task.task_id, category="harbor",
        end=EpisodeEnd.FINISHED, turns=[], files=files,
    )  # fmt: skip
    task = GradedTask(task=candidate.task, hidden=candidate.hidden)
    assert touched_hidden_files(rollout, task) == []
    lease = await pool.acquire(200.0)
    return await grade(rollout, task, lease.sandbox, 65536)


async def test_an_episode_is_graded_by_the_tasks_own_verifier(pool, tmp_path):
    candidate = write(tmp_path / "greeting")
    lease = await pool.acquire(200.0)
    machine = lease.sandbox
    await open_workspace(machine, candidate.task, "r", has_git=True)
    script = "cat /app/data/note.txt; ls /tests /logs; echo \"print('hello')\" > /app/greet.py"
    done = await machine.exec(["sh", "-c", script], timeout_s=60.0)
    assert done.stdout.decode().split() == ["a", "note", "/logs:", "/tests:"]
    changes = await read_changes(
        machine, candidate.task.contents, num_files_max=9, num_bytes_max=9999
    )
    files = {path: data for path, data in changes.files.items() if path == "greet.py"}
    assert files == {"greet.py": b"print('hello')\n"}
    findings = await graded(pool, candidate, files)
    assert (findings.outcome, findings.num_tests) == (Outcome.SOLVED, 1)
    failed = await graded(pool, candidate, {"greet.py": b"print('hi')\n", "tests/mine.py": b"1"})
    assert failed.outcome is Outcome.FAILED
    assert "'hi' != 'hello'" in failed.detail


async def test_binary_files_reach_episode_and_verifier_as_they_are(pool, tmp_path):
    given, wanted = b"\x89PNG\xff\0given", b"\x89PNG\xff\0wanted"
    candidate = write(
        tmp_path / "picture",
        **{
            "environment/data/a.png": given,
            "tests/wanted.png": wanted,
            "tests/test.sh": "cmp -s /app/data/a.png /tests/wanted.png; "
            "echo $((1 - $?)) > /logs/verifier/reward.txt\n",
            "solution/a.png": wanted,
            "solution/solve.sh": 'cp "$(dirname "$0")/a.png" /app/data/a.png\n',
        },
    )
    lease = await pool.acquire(200.0)
    machine = lease.sandbox
    await open_workspace(machine, candidate.task, "r", has_git=True)
    assert await machine.read_file("data/a.png", 99) == given
    initial = candidate.task.contents
    changes = await read_changes(machine, initial, num_files_max=9, num_bytes_max=9999)
    assert (changes.files, changes.deleted) == ({}, [])
    await machine.write_files({"data/a.png": wanted})
    changes = await read_changes(machine, initial, num_files_max=9, num_bytes_max=9999)
    assert changes.files == {"data/a.png": wanted}
    assert (await graded(pool, candidate, changes.files)).outcome is Outcome.SOLVED
    assert (await graded(pool, candidate, {"data/a.png": given})).outcome is Outcome.FAILED
    lab = MachineLab(pool)
    await check_candidate(candidate, lab.grade, repeats=1, solve=lab.solve)


@pytest.mark.parametrize(
    ("verifier", "is_solved"),
    [
        ("echo '{\"reward\": 1.0}' > /logs/verifier/reward.json", True),
        ("echo 1.0 > /logs/verifier/reward.txt", True),
        ("/tests/reward.sh 1", True),
        ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', False),
        ("echo 0.5 > /logs/verifier/reward.txt", False),
        ("echo much > /logs/verifier/reward.txt", False),
        ("true", False),
    ],
)
async def test_a_reward_is_read_as_harbor_reads_it(pool, tmp_path, verifier, is_solved):
    helper = "#!/bin/sh\necho $1 > /logs/verifier/reward.txt\n"
    files = {"tests/test.sh": verifier, "tests/reward.sh": helper}
    candidate = write(tmp_path / "greeting", **files)
    findings = await graded(pool, candidate, {"greet.py": b"1\n"})
    assert (findings.outcome is Outcome.SOLVED) == is_solved


@pytest.mark.parametrize(
    "cheat",
    [
        "open('/tests/test.sh', 'a').write('\\necho 1 > /logs/verifier/reward.txt\\n')",
        "import os, pathlib, signal\n"
        "pathlib.Path('/logs/verifier/reward.txt').write_text('1')\n"
        "[os.kill(int(path.parent.name), signal.SIGKILL)\n"
        " for path in pathlib.Path('/proc').glob('[0-9]*/cmdline')\n"
        " if path.read_bytes() == b'bash\\0/tests/test.sh\\0']",
    ],
)
async def test_code_that_writes_its_own_reward_is_found_out(pool, tmp_path, cheat):
    candidate = write(tmp_path / "greeting")
    findings = await graded(pool, candidate, {"greet.py": cheat.encode()})
    assert findings.outcome is Outcome.POLICY_ERROR
    assert "hidden_tests (file greet.py: names /" in findings.detail


async def test_the_gates_try_its_own_solution(pool, tmp_path):
    lab = MachineLab(pool)
    await check_candidate(write(tmp_path / "good"), lab.grade, repeats=1, solve=lab.solve)
    wrong = {"solution/solve.sh": "echo no > /app/greet.py\n"}
    with pytest.raises(TaskRejectedError, match="0 of 1"):
        await check_candidate(
            write(tmp_path / "bad", **wrong), lab.grade, repeats=1, solve=lab.solve
        )


def test_it_comes_back_as_it_was_read(tmp_path):
    candidate = write(tmp_path / "greeting")
    assert candidate.task.files == {"greet.py": "print('goodbye')\n", "data/note.txt": "a note\n"}
    assert candidate.task.limits.wall_s_max == 90.0
    assert not any("hello" in text for text in candidate.task.files.values())
    folder = write_harbor(candidate, Split.TRAIN, tmp_path / "again")
    assert read_harbor(folder) == candidate
    for name in ("tests/test.sh", "tests/check_greeting.py", "solution/solve.sh"):
        assert (folder / name).read_text() == FILES[name]


PARTS = {
    "echo 0.25 > /logs/verifier/reward.txt": 0.25,
    'echo \'{"reward": 0.75, "speed": 3}\' > /logs/verifier/reward.json': 0.75,
    'echo \'{"one": 1, "two": 0.5}\' > /logs/verifier/reward.json': 0.75,
    "echo 1.5 > /logs/verifier/reward.txt": None,
}


async def test_a_verifier_may_give_a_part_of_the_reward(pool, tmp_path):
    for number, (command, expected) in enumerate(PARTS.items()):
        candidate = write(tmp_path / str(number), **{"tests/test.sh": f"#!/bin/bash\n{command}\n"})
        findings = await graded(pool, candidate, {"greet.py": b"print(1)\n"})
        assert (findings.outcome, findings.score) == (Outcome.FAILED, expected), command
