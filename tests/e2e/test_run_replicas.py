"""Two replicas per region, another that joins and is lost for good: the run does not notice."""

import json
import subprocess
import time

import pytest

from .launched import PENSTOCK, Launched, gone, machines, penstock

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(500)]

STEPS = 30
REPLICAS = (
    'processes.generator-west=["generator:west/a"]',
    'processes.generator-west-b=["generator:west/b"]',
    'processes.generator-east=["generator:east/a"]',
    'processes.generator-east-b=["generator:east/b"]',
)


def status(run: Launched) -> dict:
    told = penstock(run.runs, "status", run.folder.name, "--json")
    return json.loads(told.stdout.splitlines()[-1])


def sampled(state: dict, actor: str) -> float:
    return state["actors"].get(actor, {}).get("gauges", {}).get("generated_tokens", 0.0)


def test_replicas_join_and_are_lost_and_every_token_is_accounted_for(tmp_path):
    before = machines()
    run = Launched(
        tmp_path,
        *REPLICAS,
        f"trainer.steps_max={STEPS}",
        "evaluator.eval_every_steps=10",
        "run.wall_s_max=400",
    )
    joiner = None
    try:
        run.until("step 1: ")
        joiner = subprocess.Popen(
            [*PENSTOCK, "--runs-dir", str(tmp_path), "actor", "generator:west/c", "--run", "r1"]
        )
        deadline = time.monotonic() + 60.0
        while not sampled(state := status(run), "generator-west.c"):
            assert run.process.poll() is None and time.monotonic() < deadline, run.output
        joiner.kill()
        assert set(state["regions"]["west"]["replicas"]) == {"west.a", "west.b", "west.c"}
        assert set(state["regions"]["east"]["replicas"]) == {"east.a", "east.b"}
        run.kill("actor", "generator:west/a")
        assert run.wait(400.0) == 0, run.output
    finally:
        run.end()
        if joiner is not None:
            joiner.kill()
            joiner.wait()
    run.check_sound(steps=STEPS)
    told = penstock(tmp_path, "log", "cat", "r1", "--type", "EvalCompleted")
    evaluated = [json.loads(line) for line in told.stdout.splitlines()]
    assert [one["policy_version"] for one in evaluated] == [0, 10, 20, 30]
    for one in evaluated:
        assert one.get("num_wrong_version", 0) == 0
        assert one["num_tasks"] + one.get("num_masked", 0) == 4
    assert sum(one["num_tasks"] for one in evaluated) > 0
    assert gone(machines() - before)
