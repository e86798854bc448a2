"""A run whose machines are on two hosts: one is killed, and nothing of it reaches the loss."""

import json
import random
import time

import pytest

from .launched import Launched, gone, machines, machines_of, penstock

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 20
NUM_READY = 2
TWO_HOSTS = (
    f"trainer.steps_max={STEPS}",
    "trainer.filter_zero_variance=false",
    'processes.machines=["sandbox_host:a", "judge"]',
    'processes.machines-b=["sandbox_host:b"]',
    'processes.scheduler=["scheduler"]',
    "sandbox_host.reports_to_scheduler=true",
    f"sandbox_host.pool.size={NUM_READY}",
    "rollout_worker.places_groups=true",
    "rollout_worker.num_machines_max=1",  # A lost machine is not made up for: it shows.
)


def logged(run: Launched, event_type: str) -> list[dict]:
    told = penstock(run.runs, "log", "cat", run.folder.name, "--type", event_type)
    return [json.loads(line) for line in told.stdout.splitlines()]


def until_in_use(run: Launched, host: str) -> None:
    """Wait until a host has more machines than it keeps ready: three processes each."""
    deadline = time.monotonic() + 60.0
    while len(machines_of(run.pid_of("actor", host))) <= 3 * NUM_READY:
        assert time.monotonic() < deadline, f"nothing runs on {host}"
        time.sleep(0.01)


@pytest.mark.parametrize("victim", ["sandbox_host:b", "scheduler"])
def test_a_killed_hosts_episodes_are_masked_and_the_run_goes_on(tmp_path, victim):
    before = machines()
    run = Launched(tmp_path, *TWO_HOSTS)
    try:
        run.until("step 1: ")
        moments = random.Random(victim)
        for _ in range(3):
            if victim == "sandbox_host:b":
                until_in_use(run, victim)
            run.kill("actor", victim)
            time.sleep(moments.uniform(1.0, 4.0))
        assert run.wait(300.0) == 0, run.output
    finally:
        run.end()
    run.check_sound(steps=STEPS)
    rollouts = logged(run, "RolloutFinished")
    lost = {r["rollout_id"] for r in rollouts if r["end"] == "infrastructure_error"}
    assert lost or victim == "scheduler"
    entries = [entry for manifest in logged(run, "BatchManifest") for entry in manifest["groups"]]
    samples = [sample for entry in entries for sample in entry["samples"]]
    trained = {s["rollout_id"] for s in samples if s["outcome"] != "infrastructure_error"}
    assert not lost & trained
    assert gone(machines() - before)
