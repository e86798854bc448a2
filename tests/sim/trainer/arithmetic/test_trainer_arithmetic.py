"""A run that moves to a processor with other vector units goes on, and says so."""

import json
import os
import pickle
import subprocess
import sys

import pytest

from penstock.messages.control import RunFinished
from penstock.messages.training import ArithmeticChanged, StepCompleted


def stay(file, unit: str, *action: str) -> dict:
    """Have the run on a machine with a vector unit; return what the process says."""
    environment = os.environ | ({"ATEN_CPU_CAPABILITY": unit} if unit else {})
    command = [sys.executable, "-m", "tests.sim.trainer.arithmetic.moved_run", str(file), *action]
    out = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert out.returncode == 0, out.stderr[-3000:]
    return json.loads(out.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["default", "avx2"])
@pytest.mark.parametrize("num_until_kill", ["4", "5", "7"])
def test_a_run_that_moves_goes_on_and_replay_names_what_it_repeats(tmp_path, unit, num_until_kill):
    """Killed at a checkpoint, or after steps that the new machine has to take again."""
    file = tmp_path / "world"
    first = stay(file, "", "run", num_until_kill)["arithmetic"]
    second = stay(file, unit, "run")["arithmetic"]
    if first == second:
        pytest.skip(f"this processor computes alike with {unit}")
    world = pickle.loads(file.read_bytes())
    assert world.log.of(RunFinished)[0].reason == "steps_max"
    steps = {event.step: event.arithmetic for event in world.log.of(StepCompleted)}
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    assert set(steps.values()) == {first, second}
    [declared] = world.log.of(ArithmeticChanged)
    assert (declared.before, declared.now) == (first, second)
    for where, own in (("", first), (unit, second)):
        report = stay(file, where, "replay")
        assert report["first_difference"] == ""
        repeated = {span["arithmetic"] for span in report["spans"] if span["is_repeated"]}
        others = {span["arithmetic"] for span in report["spans"] if not span["is_repeated"]}
        assert first in (repeated if own == first else others)
        assert second not in repeated or own == second
        covered = [
            step for span in report["spans"] for step in range(span["first"], span["last"] + 1)
        ]
        assert covered == [1, 2, 3, 4, 5, 6]
