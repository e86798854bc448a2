"""A whole run whose ranks train a model of transformers, and its replay by one process."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.e2e.test_run_outside_model import STEPS, config_from
from tests.outside_model import write_model

from penstock.infra.commands.doctor import RANKS_PYTHON

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / RANKS_PYTHON
pytestmark = [
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no {RANKS_PYTHON}: run `make ranks-env`"),
]


def run_of(tmp_path, **tables):
    """The summary of a whole run of two ranks, replayed by one process."""
    ranks = {"num_ranks": 2, "model": "transformers"} | tables.pop("ranks", {})
    tables = {"optimizer": {"weight_decay": 200.0}} | tables | {"engine": "ranks", "ranks": ranks}
    config = config_from(tmp_path, tmp_path / "model", **tables)
    more = ["--set", "generator.probe_tolerance=0.05"] if "dtype" in ranks else []
    runs = tmp_path / "runs"
    command = [PYTHON, "-m", "penstock.infra.cli", "--runs-dir", runs, "run", "--config", config]
    done = subprocess.run(
        [*command, "--run-id", "r1", *more],
        env=os.environ | {"PYTHONPATH": f"{ROOT / '.pyroot'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((runs / "r1" / "summary.json").read_text())
    assert summary["rl"]["steps"] == STEPS
    assert summary["ledger"]["balanced"] is True
    assert summary["replay"]["identical"] is True
    assert summary["replay"]["steps_compared"] == STEPS
    return summary


def test_the_native_generator_samples_what_two_ranks_of_transformers_train(tmp_path):
    write_model(tmp_path / "model")
    summary = run_of(tmp_path)
    assert abs(summary["objective"]["mismatch_engine_k3"]) < 1e-9


def test_two_ranks_tune_a_dense_model_in_bfloat16_and_train_it(tmp_path):
    write_model(tmp_path / "model", dense=True)
    texts = tmp_path / "texts"
    texts.mkdir()
    for path in Path(__file__).parent.glob("*.py"):
        shutil.copy(path, texts)
    sizes = {"sequence_tokens": 512, "batch_tokens": 2048, "pass_tokens": 512}
    summary = run_of(
        tmp_path,
        ranks={"dtype": "bfloat16"},
        model={"corpora": [{"path": str(texts)}]},
        midtrain={"num_tokens": 20_000, "report_steps": 2} | sizes,
    )
    assert summary["midtrain"]["loss_last"] < summary["midtrain"]["loss_first"]
    assert abs(summary["objective"]["mismatch_engine_k3"]) < 1e-3


def test_two_ranks_train_adapters_that_the_native_generator_merges(tmp_path):
    write_model(tmp_path / "model", dense=True)
    # Random weights solve nothing: no advantage, but the entropy has a gradient.
    summary = run_of(
        tmp_path,
        adapter={"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"]},
        optimizer={"learning_rate": 0.01},
        loss={"entropy_bonus": 1.0},
    )
    assert abs(summary["objective"]["mismatch_engine_k3"]) < 1e-9
    assert summary["sync"]["full_uploads_after_v0"] == 0
