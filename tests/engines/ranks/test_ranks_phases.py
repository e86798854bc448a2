"""Mid-training, DPO and KTO of a model of transformers on ranks, with the bits of one process."""

import json

import pytest
from tests.engines.ranks import test_ranks_models
from tests.engines.ranks.test_ranks_models import command, finish, free_port

KINDS, PHASES = ("qwen2", "gpt_oss"), ("midtrain", "preferences")
DTYPES = ("float32", "bfloat16")
CASES = [(kind, phase, dtype) for kind in KINDS for phase in PHASES for dtype in DTYPES]
pytestmark = test_ranks_models.pytestmark


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What one and what two processes give, by number and case."""
    root = tmp_path_factory.mktemp("phases")
    finish([command("hf_models.py", "make", *KINDS, str(root))])
    files = {}
    for num_ranks in (1, 2):
        specs = []
        for case in CASES:
            kind, phase, dtype = case
            out = root / f"{num_ranks}-{'-'.join(case)}.json"
            files[num_ranks, case] = out
            spec = {"folder": str(root / kind), "expert_ranks": 1, "phase": phase}
            specs.append(spec | {"ranks": {"dtype": dtype}, "out": str(out)})
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
    return {key: json.loads(file.read_text()) for key, file in files.items()}


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_ranks_give_the_bits_of_one_process(case, found):
    assert found[2, case] == found[1, case]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_phase_learns(case, found):
    seen = found[2, case]
    if case[1] == "midtrain":
        assert seen["last"] < seen["first"] - 0.5
        assert seen["after"] < seen["first"] - 0.5
    else:
        assert seen["after"]["dpo_accuracy"] > seen["before"]["dpo_accuracy"]
        assert seen["after"]["loss"] < seen["before"]["loss"]
        assert seen["after"]["kto_loss"] < seen["before"]["kto_loss"]
