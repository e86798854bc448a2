"""Every family that transformers loads: in, two steps on two ranks, out, equal logits."""

import json

import pytest
import torch
from tests.engines.ranks import test_ranks_models
from tests.engines.ranks.hf_families import FAMILIES
from tests.engines.ranks.test_ranks_models import command, exported, finish, free_port

NUM_RANKS, NUM_STEPS = 2, 2
pytestmark = test_ranks_models.pytestmark


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What rank 0 saw of each family, and what transformers computes with its export."""
    root = tmp_path_factory.mktemp("families")
    finish([command("hf_models.py", "make", *FAMILIES, str(root))])
    specs = []
    for kind in FAMILIES:
        run = root / f"runs-{kind}" / "r1"
        run.mkdir(parents=True)
        (run / "config.toml").write_text("")
        spec = {"folder": str(root / kind), "expert_ranks": 1, "steps": NUM_STEPS}
        specs.append(spec | {"store": str(run / "objects"), "out": str(run / "out.json")})
    place = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "PENSTOCK_RANKS_SECRET": "s" * 32,
        "MASTER_PORT": free_port(),
    }
    finish(
        [
            command("worker.py", json.dumps(specs), RANK=str(i), LOCAL_RANK=str(i), **place)
            for i in range(NUM_RANKS)
        ]
    )
    runs = [root / f"runs-{kind}" / "r1" for kind in FAMILIES]
    outs = [exported(run, run / "out") for run in runs]
    (text,) = finish([command("hf_models.py", "logits", *outs)])
    found = [json.loads((run / "out.json").read_text()) for run in runs]
    return dict(
        zip(FAMILIES, zip(found, map(json.loads, text.splitlines()), strict=True), strict=True)
    )


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_trains_and_leaves_as_it_came(kind, trained):
    found, exported_logits = trained[kind]
    assert [step["skipped"] for step in found["steps"]] == [""] * NUM_STEPS
    assert all(step["grad_norm"] > 0 for step in found["steps"])
    has_routes = any(step["router_mismatch"] > 0.1 for step in found["steps"])
    assert has_routes == ("num_experts_per_tok" in FAMILIES[kind][1])
    assert found["published"] == found["whole"]
    assert len(set(found["published"])) == NUM_STEPS + 1
    ours, theirs = torch.tensor(found["logits"]), torch.tensor(exported_logits)
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)
