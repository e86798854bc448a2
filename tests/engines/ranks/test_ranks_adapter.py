"""LoRA on ranks, by PEFT: the bits of one process, full training's steps, and every phase."""

import json

import pytest
import torch
from tests.engines.ranks import test_ranks_models
from tests.engines.ranks.test_ranks_models import command, finish, free_port
from tests.numerics.adapter_steps import NUM_STEPS, OPTIMIZER, SHAPE

from penstock.actors.policy.checkpoint import save_checkpoint
from penstock.actors.policy.model import Policy

KINDS = ("smollm2", "qwen3", "gemma2")
ADAPTER = {"adapter": {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}}
CASES = {
    f"{kind}-{what}-{dtype}": (kind, more, {"dtype": dtype})
    for kind in KINDS
    for what, more in {
        "rl": {"steps": 2},
        "midtrain": {"phase": "midtrain"},
        "preferences": {"phase": "preferences"},
    }.items()
    for dtype in ("float32", "bfloat16")
    if kind == KINDS[0] or (dtype == "float32" and what == "rl")
}
pytestmark = test_ranks_models.pytestmark


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What one and what two processes give, by number and case."""
    root = tmp_path_factory.mktemp("adapters")
    finish([command("hf_models.py", "make", *KINDS, str(root))])
    files = {}
    for num_ranks in (1, 2):
        specs = []
        for name, (kind, more, ranks) in CASES.items():
            files[num_ranks, name] = out = root / f"{num_ranks}-{name}.json"
            spec = {"folder": str(root / kind), "expert_ranks": 1, "out": str(out)}
            if "steps" in more:
                folders = {"store": "objects", "checkpoints": "checkpoints"}
                spec |= {k: str(root / f"{num_ranks}-{name}-{v}") for k, v in folders.items()}
            trainer = ADAPTER | {"activation_checkpointing": kind == "qwen3"}
            specs.append(spec | more | {"ranks": ranks, "trainer": trainer})
        place = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
        place["MASTER_PORT"] = free_port()
        finish(
            [
                command("worker.py", json.dumps(specs), RANK=str(i), LOCAL_RANK=str(i), **place)
                for i in range(num_ranks)
            ]
        )
    return {key: json.loads(file.read_text()) for key, file in files.items()}


@pytest.mark.parametrize("name", CASES)
def test_ranks_give_the_bits_of_one_process(name, found):
    assert found[2, name] == found[1, name]


@pytest.mark.parametrize("name", [name for name in CASES if "-rl-" in name])
def test_steps_change_adapters_which_are_published_with_the_base(name, found):
    seen = found[2, name]
    assert all(step["skipped"] == "" and step["grad_norm"] > 0 for step in seen["steps"])
    assert len({step["weights"] for step in seen["steps"]}) == 2
    assert seen["published"] == seen["whole"]
    assert len(set(seen["published"])) == 3


@pytest.mark.parametrize("name", [name for name in CASES if "-rl-" not in name])
def test_the_phase_learns(name, found):
    seen = found[2, name]
    if "-midtrain-" in name:
        assert seen["last"] < seen["first"] - 0.02
        assert seen["after"] < seen["first"] - 0.02
    else:
        assert seen["after"]["dpo_accuracy"] > seen["before"]["dpo_accuracy"]
        assert seen["after"]["loss"] < seen["before"]["loss"]


def test_full_rank_is_full_training_of_the_same_matrices(tmp_path):
    policy = Policy(SHAPE, seed=1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(parameter.bfloat16())
    save_checkpoint(policy, tmp_path / "model")
    spec = {"folder": str(tmp_path / "model"), "phase": "full_rank", "out": str(tmp_path / "out")}
    place = {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    finish([command("worker.py", json.dumps(spec), RANK="0", LOCAL_RANK="0", **place)])
    seen = json.loads((tmp_path / "out").read_text())
    assert seen["moved"] > NUM_STEPS * OPTIMIZER.learning_rate / 10
    assert seen["off"] < 1e-5
