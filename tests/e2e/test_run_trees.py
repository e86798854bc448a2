"""A run whose rollouts share machines in mid-episode, and whose worker is killed; needs QEMU."""

import json

import pytest

from penstock.envs.backends import open_backend
from penstock.envs.sandbox import BackendUnavailable

from .launched import Launched, penstock

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(1500)]
WAIT_S = 1200.0
STEPS = 2
SETTINGS = (
    "sandbox_host.pool.backend=qemu-tcg",
    "sandbox_host.pool.live_max=24",
    "pacer.tree.trunk_turns=1",
    "pacer.tree.branches=2",
    "rollout_worker.checkpoint_turns=1",
    "rollout_worker.num_concurrent=2",
    f"trainer.steps_max={STEPS}",
    "run.wall_s_max=1200.0",
    "users.num_requests=0",
    "prepare.limits={num_turns_max=4, num_tokens_max=512, turn_tokens_max=24}",
)


@pytest.fixture(scope="module", autouse=True)
def qemu():
    try:
        open_backend("qemu-tcg")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))


def events(run: Launched, name: str) -> list[dict]:
    told = penstock(run.runs, "log", "cat", run.folder.name, "--type", name)
    return [json.loads(line) for line in told.stdout.splitlines()]


def test_branches_of_saved_machines_are_trained_and_a_killed_worker_goes_on(tmp_path):
    run = Launched(tmp_path, *SETTINGS)
    run.until("step 1: ", wait_s=WAIT_S)
    run.kill("actor", "rollout_worker")
    assert run.wait(WAIT_S) == 0, run.output
    run.check_sound(steps=STEPS)
    ends = [end for end in events(run, "RolloutFinished") if end["purpose"] == "train"]
    branches = [end for end in ends if end.get("trunk")]
    assert branches, "no rollout branched off another"
    by_id = {end["rollout_id"]: end for end in ends}
    for branch in branches:
        trunk = by_id[branch["trunk"]["rollout_id"]]
        assert branch["turns"][0] == trunk["turns"][0]
        assert branch["sandbox"]["backend"] == "qemu-tcg"
    sampled = {(turn["rollout_id"], turn["turn_index"]) for turn in events(run, "TurnSampled")}
    assert not sampled & {(branch["rollout_id"], 0) for branch in branches}
    assert {event["host"] for event in events(run, "EpisodeSaved")} == {"local"}
