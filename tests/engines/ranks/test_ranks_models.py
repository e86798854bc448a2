"""Models of transformers on ranks: Qwen3-MoE, GLM-4.5, DeepSeek-V3, with and without EP."""

import asyncio
import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from tests.unit.models.test_models_export import CODE, export

from penstock.actors.policy.tokenizer import TOKENIZER_KEY, train_tokenizer
from penstock.infra.commands.doctor import RANKS_PYTHON
from penstock.infra.stores.directory import DirectoryStore

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / RANKS_PYTHON
KINDS = ("qwen3_moe", "glm4_moe", "deepseek_v3")
LAYOUTS = {"fsdp": (2, 1), "fsdp+ep": (2, 2)}
NUM_STEPS = 3
WAIT_S = 600
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no {RANKS_PYTHON}: run `make ranks-env`"),
]


def command(script, *arguments, **environment):
    """Start a script in the environment of `ranks`, with one thread."""
    return subprocess.Popen(
        [PYTHON, "-W", "ignore", Path(__file__).with_name(script), *arguments],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT / '.pyroot'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes):
    """Return what each printed; where one fails or hangs, all are killed."""
    try:
        done = [process.communicate(timeout=WAIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, done, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [output for output, _ in done]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def train(folder, out, num_ranks=1, expert_ranks=1, **more):
    """Train on so many ranks; return what rank 0 saw."""
    spec = {"folder": str(folder), "expert_ranks": expert_ranks, "steps": NUM_STEPS, **more}
    spec["out"] = str(out)
    place = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "PENSTOCK_RANKS_SECRET": "s" * 32,
        "MASTER_PORT": free_port(),
    }
    finish(
        [
            command("worker.py", json.dumps(spec), RANK=str(i), LOCAL_RANK=str(i), **place)
            for i in range(num_ranks)
        ]
    )
    return json.loads(out.read_text())


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    finish([command("hf_models.py", "make", request.param, str(folder))])
    return folder / request.param


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """What one process gives."""
    return train(model, tmp_path_factory.mktemp("alone") / "out.json")


def assert_equal_steps(found, expected):
    assert len(found["steps"]) == NUM_STEPS
    for step, reference in zip(found["steps"], expected["steps"], strict=True):
        assert step["skipped"] == reference["skipped"] == ""
        assert step["tokens_trained"] == reference["tokens_trained"]
        assert step["router_mismatch"] == pytest.approx(reference["router_mismatch"], abs=1e-9)
        assert step["loss"] == pytest.approx(reference["loss"], abs=1e-6)
        assert step["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)


def test_recorded_routes_are_used(model, alone, tmp_path):
    assert all(step["router_mismatch"] > 0.5 for step in alone["steps"]), "routes are random"
    free = train(model, tmp_path / "free.json", mode="off")
    differences = [
        abs(step["loss"] - other["loss"]) / abs(step["loss"])
        for step, other in zip(alone["steps"], free["steps"], strict=True)
    ]
    assert min(differences) > 1e-3, "the same loss with other experts"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_train_as_one_process_and_publish_from_shards(model, alone, layout, tmp_path):
    num_ranks, expert_ranks = LAYOUTS[layout]
    run = tmp_path / "runs" / "r1"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("")
    folders = {"store": str(run / "objects"), "checkpoints": str(tmp_path / "checkpoints")}
    found = train(model, tmp_path / "out.json", num_ranks, expert_ranks, **folders)
    assert_equal_steps(found, alone)
    if expert_ranks == 1:
        assert [step["weights"] for step in found["steps"]] == [
            s["weights"] for s in alone["steps"]
        ]
        assert [s["optimizer"] for s in found["steps"]] == [s["optimizer"] for s in alone["steps"]]
    assert found["published"] == found["whole"]
    assert len(set(found["published"])) == NUM_STEPS + 1
    assert_exports(run, tmp_path / "out", found["logits"])
    # One process takes up what ranks saved, whatever part of an expert each of them held.
    resumed = train(model, tmp_path / "resumed.json", steps=0, checkpoints=folders["checkpoints"])
    assert resumed["loaded"] == found["steps"][-1]["weights"]
    torch.testing.assert_close(
        torch.tensor(resumed["logits"]), torch.tensor(found["logits"]), atol=1e-5, rtol=0
    )


def exported(run, out):
    """Export the newest version of a run."""
    tokenizer = train_tokenizer([CODE], vocab_size=400)
    put = DirectoryStore(run / "objects").put(TOKENIZER_KEY, tokenizer.to_json().encode())
    asyncio.run(put)
    assert export(run, "-o", str(out)) == 0
    return str(out)


def assert_exports(run, out, expected):
    """An export of the newest version computes in transformers what the ranks do."""
    exported(run, out)
    (text,) = finish([command("hf_models.py", "logits", str(out))])
    theirs, ours = torch.tensor(json.loads(text)), torch.tensor(expected)
    assert theirs.abs().max() > 0.5
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)


def test_four_ranks_with_two_parts_of_the_experts_each_twice(model, alone, tmp_path):
    store = str(tmp_path / "objects")
    found = train(model, tmp_path / "out.json", 4, 2, store=store)
    assert_equal_steps(found, alone)
    assert found["published"] == found["whole"]
