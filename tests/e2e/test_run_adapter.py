"""Whole runs with LoRA: trained, published as small deltas, sampled, replayed, taken elsewhere."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.test_run_outside_model import STEPS, difference, exported, run_from
from tests.outside_model import write_model

from penstock.actors.policy.checkpoint import tensor_shapes
from penstock.actors.policy.hf.config import read_hf_config
from penstock.actors.policy.probe import NUM_PROMPTS

from .launched import penstock

pytest.importorskip("transformers")
pytest.importorskip("renderers")
pytestmark = [
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]
SIZES = {"sequence_tokens": 512, "batch_tokens": 2048, "pass_tokens": 1024}
MIDTRAIN = {"num_tokens": 8_000, "report_steps": 1, "learning_rate": 0.01} | SIZES
# Random weights solve nothing: no advantage, but the entropy has a gradient.
LOSS = {"entropy_bonus": 1.0}


def versions(launched):
    shown = penstock(launched.runs, "log", "cat", "r1", "--type", "WeightsPublished")
    return [json.loads(line) for line in shown.stdout.splitlines()]


def adapter_of(launched, folder, *chosen):
    """A version's adapter as a folder of PEFT has it."""
    done = penstock(launched.runs, "export", "r1", "--format", "peft", "-o", str(folder), *chosen)
    assert done.returncode == 0, done.stderr
    return load_file(folder / "adapter_model.safetensors")


def test_adapters_train_in_every_phase_and_start_another_run(tmp_path):
    model, texts = tmp_path / "model", tmp_path / "texts"
    write_model(model, dense=True)
    texts.mkdir()
    shutil.copy(__file__, texts)
    launched = run_from(
        tmp_path,
        model,
        adapter={"rank": 2, "alpha": 4.0},
        model={"corpora": [{"path": str(texts)}]},
        midtrain=MIDTRAIN,
        loss=LOSS,
    )
    tuned = launched.summary["midtrain"]
    assert tuned["loss_last"] < tuned["loss_first"]
    first, *later = versions(launched)
    assert len(later) == STEPS
    num_base = sum(torch.Size(shape).numel() for shape in shapes_of(model).values())
    for version in later:
        assert version["kind"] == "delta"
        assert 0 < version["num_changed"] <= first["num_params"] - num_base
    adapted, base = first["probe"][:NUM_PROMPTS], first["probe"][NUM_PROMPTS:]
    assert adapted != base, "mid-training gave the adapter an effect"
    assert later[-1]["probe"][NUM_PROMPTS:] == base, "the base stays as it is"
    assert later[-1]["probe"][:NUM_PROMPTS] != adapted
    # Merged, transformers computes what ours does; the adapter alone goes into another run.
    merged = exported(launched, tmp_path / "out")
    assert difference(merged, "Qwen3ForCausalLM") < 1e-4
    folder = tmp_path / "peft"
    trained = adapter_of(launched, folder)
    again = tmp_path / "again"
    again.mkdir()
    second = run_from(again, model, model={"adapter": str(folder)}, loss=LOSS)
    taken = adapter_of(second, again / "v0", "--version", "0")
    assert taken.keys() == trained.keys()
    assert all(torch.equal(value, taken[name]) for name, value in trained.items())
    assert versions(second)[0]["probe"][NUM_PROMPTS:] == pytest.approx(base, abs=1e-6)


def shapes_of(model):
    return tensor_shapes(read_hf_config(model))
