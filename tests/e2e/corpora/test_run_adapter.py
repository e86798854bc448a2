"""Whole runs with LoRA, as docs/lora.md prints them: trained, published, replayed, exported."""

import json
import shutil
import subprocess
import tomllib

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from tests.docs.commands import ROOT, blocks, commands
from tests.e2e.launched import PENSTOCK, penstock
from tests.e2e.test_run_outside_model import STEPS, config_from, difference
from tests.outside_model import write_model

from penstock.actors.policy.checkpoint import tensor_shapes
from penstock.actors.policy.hf.config import read_hf_config
from penstock.actors.policy.probe import NUM_PROMPTS

pytest.importorskip("transformers")
pytest.importorskip("renderers")
pytestmark = [
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]
PAGE = ROOT / "docs/lora.md"
SIZES = {"sequence_tokens": 512, "batch_tokens": 2048, "pass_tokens": 1024}
MIDTRAIN = {"num_tokens": 8_000, "report_steps": 1, "learning_rate": 0.01} | SIZES
# Random weights solve nothing: no advantage, but the entropy has a gradient.
LOSS = {"entropy_bonus": 1.0}


def write_config(folder):
    """The tiny configuration with the page's tables, as `my.toml`."""
    texts = folder / "texts"
    texts.mkdir()
    shutil.copy(__file__, texts)
    write_model(folder / "model", dense=True)
    [text] = [content for _, language, content in blocks(PAGE) if language == "toml"]
    table = tomllib.loads(text)
    assert table["model"] == {"checkpoint": "DIR"}
    config = config_from(
        folder,
        folder / "model",
        model={"corpora": [{"path": str(texts)}]},
        midtrain=MIDTRAIN,
        loss=LOSS,
        **table["trainer"],
    )
    config.rename(folder / "my.toml")


def follow(folder, monkeypatch):
    """Execute the page's commands as printed."""
    monkeypatch.chdir(folder)
    printed = [each for each in commands() if each.page == "docs/lora.md"]
    printed = [each for each in printed if {"my.toml", "tuned"} & set(each.words)]
    assert len(printed) == 4
    for command in printed:
        if "further" in command.words:
            leave_out_midtraining(folder / "my.toml")
        done = subprocess.run(
            [*PENSTOCK, *command.words[1:]],
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, command.name + done.stdout + done.stderr


def leave_out_midtraining(path):
    config = tomllib.loads(path.read_text())
    del config["model"]["corpora"], config["trainer"]["midtrain"]
    path.write_text(tomli_w.dumps(config))


def check_sound(run):
    found = json.loads((run / "summary.json").read_text())
    assert found["rl"]["steps"] == found["replay"]["steps_compared"] == STEPS
    assert found["ledger"]["balanced"] is True
    assert found["replay"]["identical"] is True
    assert found["sync"]["full_uploads_after_v0"] == 0
    return found


def versions(runs, name):
    shown = penstock(runs, "log", "cat", name, "--type", "WeightsPublished")
    return [json.loads(line) for line in shown.stdout.splitlines()]


def test_the_page_is_right(tmp_path, monkeypatch):
    write_config(tmp_path)
    follow(tmp_path, monkeypatch)
    runs = tmp_path / "runs"
    tuned = check_sound(runs / "tuned")["midtrain"]
    assert tuned["loss_last"] < tuned["loss_first"]
    check_sound(runs / "further")
    first, *later = versions(runs, "tuned")
    assert len(later) == STEPS
    shapes = tensor_shapes(read_hf_config(tmp_path / "model"))
    num_base = sum(torch.Size(shape).numel() for shape in shapes.values())
    for version in later:
        assert version["kind"] == "delta"
        assert 0 < version["num_changed"] <= first["num_params"] - num_base
    adapted, base = first["probe"][:NUM_PROMPTS], first["probe"][NUM_PROMPTS:]
    assert adapted != base, "mid-training gave the adapter an effect"
    assert later[-1]["probe"][NUM_PROMPTS:] == base, "the base stays as it is"
    assert later[-1]["probe"][:NUM_PROMPTS] != adapted
    assert difference(tmp_path / "MERGED", "Qwen3ForCausalLM") < 1e-4
    # The further run's version 0 is the adapter that the first one ended with.
    taken = tmp_path / "taken"
    done = penstock(
        runs, "export", "further", "--version", "0", "--format", "peft", "-o", str(taken)
    )
    assert done.returncode == 0, done.stderr
    trained, found = (
        load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "ADAPTER", taken)
    )
    assert found.keys() == trained.keys()
    assert all(torch.equal(value, found[name]) for name, value in trained.items())
    started = versions(runs, "further")[0]["probe"]
    assert started == pytest.approx(later[-1]["probe"], abs=1e-6)
