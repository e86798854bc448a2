"""`python -m tests.lab real-size`: the comparison runs from end to end, tiny and on a CPU."""

import json

import pytest
from tests.lab.__main__ import main


@pytest.mark.filterwarnings("ignore")
def test_the_comparison_runs_tiny_on_a_cpu(capsys):
    pytest.importorskip("transformers")
    assert main(["real-size", "--tiny", "--device", "cpu", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["training"].keys() == {"4x64", "1x128"}
    for batch in found["training"].values():
        ratio = batch["ranks_tokens_s"] / batch["plain_tokens_s"]
        assert batch["ranks_over_plain"] == pytest.approx(ratio)
    assert found["decoding"].keys() == {"1", "4"}
    for batch in found["decoding"].values():
        assert batch["own_tokens_s"] > 0 and batch["transformers_tokens_s"] > 0
