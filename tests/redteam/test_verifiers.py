"""Code under test that wants a foreign verifier's reward: where it is separated, it gets none."""

import pytest
from tests.redteam.test_grading import few, graded, left, machine

from penstock.envs.factory.lab import run_solution
from penstock.envs.tasks.grading import run_hidden_tests
from penstock.envs.tasks.harbor.read import read_harbor
from penstock.envs.tasks.storage import GradedTask
from penstock.messages.reward import Outcome

pytestmark = pytest.mark.vm
SEPARATED = {
    "task.toml": (
        'version = "1.0"\n[verifier]\ntimeout_sec = 60.0\nenv = { WANTED = "hello" }\n'
        "[metadata.penstock]\nseparated = true\n"
    ),
    "instruction.md": "Make greet.py say hello.\n",
    "environment/greet.py": "print('goodbye')\n",
    "tests/test.sh": (
        "cat /app/greet.py && exit 1\n"
        "said=$(as-agent python3 greet.py 2> /logs/verifier/errors.txt) || exit 1\n"
        '[ "$said" = "$WANTED" ] && echo 1 > /logs/verifier/reward.txt\n'
    ),
    "solution/solve.sh": "echo \"print('hello')\" > /app/greet.py\n",
}
REWARD_FORGERIES = {
    "writes the reward": (
        "import os\nos.makedirs('/logs/verifier', exist_ok=True)\n"
        "open('/logs/verifier/reward.txt', 'w').write('1')\n"
    ),
    "writes the tests": "open('/tests/test.sh', 'w').write('echo 1 > /logs/verifier/reward.txt')\n",
    "reads the tests": "print('hello' if 'WANTED' in open('/tests/test.sh').read() else '')\n",
    "ends the verifier": (
        "import os, signal\nfor pid in os.listdir('/proc'):\n"
        "    if pid.isdigit() and os.stat('/proc/' + pid).st_uid == 1001:\n"
        "        os.kill(int(pid), signal.SIGKILL)\n"
    ),
    "speaks for its own process": (
        "import os\nfor fd in range(3, 20):\n"
        '    try: os.write(fd, b\'{"value": {"list": [0, "hello", ""]}}\\n\')\n'
        "    except OSError: pass\n"
    ),
    "takes the command's place": (
        "import os\nos.makedirs('/tmp/bin', exist_ok=True)\n"
        "open('/tests/.apart/bin/as-agent', 'w').write('echo hello')\n"
    ),
}


@pytest.fixture
def separated(tmp_path):
    for path, text in SEPARATED.items():
        (tmp_path / "greeting" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "greeting" / path).write_text(text)
    candidate = read_harbor(tmp_path / "greeting")
    return GradedTask(task=candidate.task, hidden=candidate.hidden)


async def test_a_separated_verifier_reaches_the_code_by_one_command(separated):
    right = await graded(left(**{"greet.py": b"print('hello')\n"}), separated)
    assert right.outcome is Outcome.SOLVED, right
    wrong = await graded(left(**{"greet.py": b"print('hi')\n"}), separated)
    assert wrong.outcome is Outcome.FAILED, wrong
    async with machine() as sandbox:
        (gold,) = await run_solution(sandbox, separated, is_gold=True)
    async with machine() as sandbox:
        done = await run_hidden_tests(sandbox, separated, gold.files, output_bytes_max=4096)
    assert done.stdout == b"1\n", done


@pytest.mark.parametrize("name", few(REWARD_FORGERIES, 2))
async def test_code_under_test_cannot_touch_a_separated_verifier_s_reward(separated, name):
    findings = await graded(left(**{"greet.py": REWARD_FORGERIES[name].encode()}), separated)
    assert (findings.outcome, findings.num_tests_passed) == (Outcome.FAILED, 0), findings
