"""Pairs and labels before RL, and a what-if of the run, through the command line."""

import json

import pytest

from .launched import Launched, penstock

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(3600)]
WAIT_S = 1500.0
"""On a machine with much other work."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    launched = Launched(folder, f"run.wall_s_max={WAIT_S}")
    assert launched.wait(WAIT_S) == 0, launched.output
    return folder


def lines(path, values) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def test_pairs_and_labels_of_files_are_trained_before_rl(runs, tmp_path):
    model = tmp_path / "v0"
    told = penstock(runs, "export", "r1", "--version", "0", "-o", str(model))
    assert told.returncode == 0, told.stderr
    prompt = [{"role": "user", "content": "Say yes"}]
    yes, no = ([{"role": "assistant", "content": text}] for text in ("yes", "no"))
    pair = {"prompt": prompt, "chosen": yes, "rejected": no, "tools": []}
    label = {"prompt": prompt, "completion": no, "label": False, "tools": []}
    path = lines(tmp_path / "p.jsonl", [pair, label] * 12)
    launched = Launched(
        runs, f"model.checkpoint={model}", f"model.preferences=['{path}']", "trainer.steps_max=2",
        "trainer.midtrain.num_tokens=0", "trainer.preferences.num_epochs=3",
        "trainer.preferences.learning_rate=1e-3", f"run.wall_s_max={WAIT_S}", run_id="r2",
    )  # fmt: skip
    assert launched.wait(WAIT_S) == 0, launched.output
    assert "trained on preferences: 12 pairs, 12 labels" in launched.output
    launched.check_sound(steps=2)
    told = penstock(runs, "log", "cat", "r2", "--type", "PreferencesTrained")
    trained = json.loads(told.stdout.splitlines()[-1])
    assert trained["heldout_after"]["loss"] < trained["heldout_before"]["loss"]
    bad = lines(tmp_path / "bad.jsonl", [pair, pair | {"chosen": "yes"}])
    refused = Launched(runs, f"model.checkpoint={model}", f"model.preferences=['{bad}']",
                       "trainer.midtrain.num_tokens=0", run_id="r3")  # fmt: skip
    assert refused.wait(WAIT_S) == 2
    assert "bad.jsonl:2: Expected `array | null`, got `str` - at `$.chosen`" in refused.output


def test_a_what_if_is_evaluated_beside_the_run_which_stays_as_it_is(runs):
    before = (runs / "r1/summary.json").read_bytes()
    asked = ("replay", "r1", "--what-if", "trainer.estimator=grpo", "--what-if",
             "judge.length_penalty.scale=0", "--json")  # fmt: skip
    told = penstock(runs, *asked, wait_s=WAIT_S)
    assert told.returncode == 0, told.stderr
    (folder,) = (runs / "r1/what-if").iterdir()
    answer = json.loads(told.stdout.splitlines()[-1])
    assert answer == json.loads((folder / "what-if.json").read_text())
    assert [step["step"] for step in answer["steps"]["what_if"]] == [1, 2, 3, 4]
    assert len(answer["steps"]["original"]) == 4 and answer["ended"] == ""
    (found,) = answer["heldout"]["what_if"]
    assert found["version"] == 4 and 0 < found["num_tasks"] <= 4
    assert {one["version"] for one in answer["heldout"]["original"]} == {0, 4}
    assert "r1" in (folder / "what-if.html").read_text()
    assert (folder / "model/config.json").exists()
    assert (runs / "r1/summary.json").read_bytes() == before
    again = penstock(runs, *asked, "-o", str(folder))
    assert again.returncode == 2 and "is not empty" in again.stderr
    told = penstock(runs, "replay", "r1", "--json")
    assert told.returncode == 0 and json.loads(told.stdout.splitlines()[-1])["identical"]
