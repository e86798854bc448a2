"""Settings that trade memory for time, and bfloat16: what they change, and that ranks agree."""

import json

import pytest
from tests.engines.ranks import test_ranks_models
from tests.engines.ranks.test_ranks_models import command, finish, free_port

KIND, NUM_STEPS = "gemma2", 2
"""Tied embeddings, a window, and bounds of scores and logits."""
CHUNKS = {"logits_bytes_max": 16 * 512 * 4}
SETTINGS = {
    "base": ({}, {}),
    "checkpointing": ({}, {"activation_checkpointing": True}),
    "offload": ({"offload_activations": True}, {}),
    "chunks": (CHUNKS, {}),
    "entropy": (CHUNKS, {"loss": {"entropy_bonus": 1.0}}),
    "entropy whole": ({}, {"loss": {"entropy_bonus": 1.0}}),
    "compile": ({"compile": True}, {}),
    "bfloat16": ({"dtype": "bfloat16"}, {}),
    "bfloat16 all": (CHUNKS | {"dtype": "bfloat16"}, {"activation_checkpointing": True}),
}
pytestmark = test_ranks_models.pytestmark


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The steps of one and of two processes, by number and name of the settings."""
    root = tmp_path_factory.mktemp("settings")
    finish([command("hf_models.py", "make", KIND, str(root))])
    files = {}
    for num_ranks in (1, 2):
        specs = []
        for name, (ranks, trainer) in SETTINGS.items():
            files[num_ranks, name] = out = root / f"{num_ranks}-{name}.json"
            spec = {"folder": str(root / KIND), "expert_ranks": 1, "steps": NUM_STEPS}
            specs.append(spec | {"out": str(out), "ranks": ranks, "trainer": trainer})
        place = {
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "PENSTOCK_RANKS_SECRET": "s" * 32,
        }
        place["MASTER_PORT"] = free_port()
        finish(
            [
                command("worker.py", json.dumps(specs), RANK=str(i), LOCAL_RANK=str(i), **place)
                for i in range(num_ranks)
            ]
        )
    return {key: json.loads(file.read_text())["steps"] for key, file in files.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_give_the_bits_of_one_process(name, found):
    assert found[2, name] == found[1, name]


@pytest.mark.parametrize("name", ["checkpointing", "offload"])
def test_memory_is_saved_without_another_bit(name, found):
    assert found[1, name] == found[1, "base"]


@pytest.mark.parametrize(
    ("name", "like", "rel"),
    [
        ("chunks", "base", 1e-5),
        ("compile", "base", 1e-5),
        ("entropy", "entropy whole", 1e-5),
        ("bfloat16", "base", 0.1),
        ("bfloat16 all", "bfloat16", 0.1),
    ],
)
def test_other_orders_of_sums_stay_near(name, like, rel, found):
    for step, reference in zip(found[1, name], found[1, like], strict=True):
        assert step["skipped"] == reference["skipped"] == ""
        for figure in ("loss", "grad_norm"):
            assert step[figure] == pytest.approx(reference[figure], rel=rel)


def test_the_entropys_gradient_counts(found):
    assert found[1, "entropy"][0]["grad_norm"] != pytest.approx(
        found[1, "base"][0]["grad_norm"],
        rel=1e-3,  # A hundred times what chunks change.
    )
