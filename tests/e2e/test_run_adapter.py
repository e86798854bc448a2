"""Whole runs with LoRA: trained, published as small deltas, sampled, replayed."""

import json
import shutil

import pytest
from tests.e2e.test_run_outside_model import STEPS, run_from
from tests.outside_model import write_model

from .launched import penstock

pytest.importorskip("transformers")
pytest.importorskip("renderers")
pytestmark = [
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]
RANK = 2
SIZES = {"sequence_tokens": 512, "batch_tokens": 2048, "pass_tokens": 1024}


def test_adapters_train_in_every_phase_and_a_replay_gives_their_bits(tmp_path):
    write_model(tmp_path / "model", dense=True)
    texts = tmp_path / "texts"
    texts.mkdir()
    shutil.copy(__file__, texts)
    launched = run_from(
        tmp_path,
        tmp_path / "model",
        adapter={"rank": RANK, "alpha": 4.0},
        model={"corpora": [{"path": str(texts)}]},
        midtrain={"num_tokens": 8_000, "report_steps": 1, "learning_rate": 0.01} | SIZES,
        # Random weights solve nothing: no advantage, but the entropy has a gradient.
        loss={"entropy_bonus": 1.0},
    )
    tuned = launched.summary["midtrain"]
    assert tuned["loss_last"] < tuned["loss_first"]
    shown = penstock(launched.runs, "log", "cat", "r1", "--type", "WeightsPublished")
    first, *later = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(later) == STEPS
    num_adapters = first["num_params"] - NUM_BASE
    for version in later:
        assert version["kind"] == "delta"
        assert 0 < version["num_changed"] <= num_adapters
    assert first["probe"][:16] != first["probe"][16:], "mid-training gave the adapter an effect"
    assert later[-1]["probe"][16:] == first["probe"][16:], "the base stays as it is"
    assert later[-1]["probe"][:16] != first["probe"][:16]
    print(first["num_params"], num_adapters, [v["num_changed"] for v in later], [s["num_bytes"] for v in [first,*later] for s in v["shards"]])
NUM_BASE=0
