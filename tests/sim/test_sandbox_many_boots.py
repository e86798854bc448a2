"""Boots by the hundred while machines, hosts and the scheduler are killed: nothing is left over.

`PENSTOCK_BOOTS` says how many. For thousands, in rounds that can be gone on with:
`python -m tests.sim.boots --boots 10000 --state FILE`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.envs.backends import open_backend
from penstock.envs.sandbox import BackendUnavailable

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(7200)]
NUM_BOOTS = int(os.environ.get("PENSTOCK_BOOTS", "300"))
ROOT = Path(__file__).parents[2]


def boot(state: Path, num_boots: int) -> dict:
    """Run the rounds in a process of their own: it adopts what killed processes leave behind."""
    command = [sys.executable, "-m", "tests.sim.boots", "--boots", str(num_boots)]
    done = subprocess.run(
        [*command, "--state", str(state)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_is_left_of_machines_hosts_and_schedulers_that_were_killed(tmp_path):
    try:
        open_backend("uml")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    state = tmp_path / "state.json"
    found = boot(state, NUM_BOOTS)
    assert found["boots"] >= NUM_BOOTS
    assert {"kill machine", "kill host", "kill scheduler", "done"} <= set(found["counts"])
    assert boot(state, NUM_BOOTS) == found  # It goes on from where it was: there is nothing to do.
