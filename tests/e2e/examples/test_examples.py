"""The examples, run as `make examples` does; what they print is what their README promises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..launched import PENSTOCK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.vm
def test_own_parts_are_learned_and_monitored(tmp_path):
    with subprocess.Popen(
        [sys.executable, EXAMPLES / "monitor.py", tmp_path / "own-parts"],
        stdout=subprocess.PIPE, text=True,
    ) as monitor:  # fmt: skip
        try:
            words = ["run", "--config", "config.toml", "--run-id", "own-parts", "--no-replay"]
            done = subprocess.run(
                [*PENSTOCK, "--runs-dir", str(tmp_path), *words],
                cwd=EXAMPLES / "own_parts", capture_output=True, text=True, timeout=600,
                check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            said = monitor.communicate(timeout=60)[0]
        finally:
            monitor.kill()
    rates = [float(rate) for rate in re.findall(r"step \d+: .*?pass rate ([\d.]+)", done.stdout)]
    print(rates)
    assert sum(rates[-3:]) > sum(rates[:3]) + 0.3, rates
    assert said.count("] StepCompleted: step=") == len(rates)


def test_users_are_learned_from():
    done = subprocess.run(
        [sys.executable, "-m", "examples.live_users"],
        cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after = map(int, re.findall(r"(\d+)%", done.stdout.splitlines()[-1]))
    print(done.stdout)
    assert after >= before + 10
