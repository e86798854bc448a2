"""A whole run whose attempts a program in another language plays, under kill -9 of both sides."""

import json
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from tests.e2e.launched import Launched, penstock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PLAYER = Path(__file__).parents[3] / "examples/rollouts/play.mjs"
WAIT_S = 900.0


@pytest.fixture
def node() -> str:
    found = shutil.which("node")
    if found is None:
        pytest.skip("needs Node.js")
    return found


def test_a_foreign_program_plays_groups_under_kills(tmp_path, node):
    launched = Launched(
        tmp_path, "rollouts.is_external=true", "rollouts.port=0", "rollouts.lease_s=4.0",
        "judge.judge=reported", "sandbox_host.pool.size=1", "users.num_requests=0",
        f"run.wall_s_max={WAIT_S}",
    )  # fmt: skip
    dice = random.Random(0)
    players: list[subprocess.Popen[bytes]] = []
    num_kills = 0
    ends_at = time.monotonic() + WAIT_S
    try:
        while launched.process.poll() is None and time.monotonic() < ends_at:
            if not (launched.folder / "rollouts_url").exists():
                time.sleep(0.2)
                continue
            players = [one for one in players if one.poll() is None]
            while len(players) < 3:
                command = [node, str(PLAYER), str(launched.folder), "2"]
                players.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            time.sleep(1.0)
            victim = dice.choice(players)
            victim.kill()
            victim.wait()
            num_kills += 1
            if num_kills == 6:
                launched.kill("rollout_worker")
    finally:
        for one in players:
            one.kill()
            one.wait()
    assert launched.wait(60.0) == 0, launched.output
    launched.check_sound(steps=4)
    ends = penstock(tmp_path, "log", "cat", "r1", "--type", "RolloutFinished").stdout.splitlines()
    names = [json.loads(line)["rollout_id"] for line in ends]
    assert len(names) == len(set(names)), "no attempt is counted twice"
    verdicts = penstock(tmp_path, "log", "cat", "r1", "--type", "Verdict").stdout.splitlines()
    assert {json.loads(line)["rollout_id"] for line in verdicts} == set(names), "and none is lost"
    assert num_kills > 6
