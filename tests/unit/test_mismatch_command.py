"""`penstock mismatch`: what it measures, and how it tells it."""

import json

import pytest

from penstock.infra.cli import main
from penstock.kernels import native

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="no C compiler")
TINY = """
processes = { all = ["trainer"] }
regions = [{ name = "west", serves = ["train", "eval", "live"] }]
[policy]
vocab_size = 300
hidden_size = 32
num_hidden_layers = 2
head_dim = 16
moe_intermediate_size = 32
max_position_embeddings = 256
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_modes_and_remedies_are_told_in_one_object(config, capsys):
    assert main(["mismatch", "--config", str(config), "--tokens", "200", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    exact, fast, off = (figures[mode] for mode in ("exact", "fast", "off"))
    assert exact["tokens"] >= 200
    assert exact["kl_k1"] == exact["kl_k3"] == exact["logprob_abs_diff_max"] == 0.0
    assert 0.0 < fast["logprob_abs_diff_max"] < off["logprob_abs_diff_max"]
    assert exact["flips_per_layer"] == fast["flips_per_layer"] == [0.0, 0.0]
    assert fast["first_layer"]["layer"] == 0
    for row in figures["remedies"]:
        assert not row["replay"] or row["flips_per_layer"] == [0.0, 0.0]
    assert figures["routes"]["sealed"] < figures["routes"]["raw"]


def test_a_table_is_for_people(config, capsys):
    assert main(["mismatch", "--config", str(config), "--tokens", "50"]) == 0
    out = capsys.readouterr().out
    assert "exact" in out and "bfloat16 between layers: fp32_gate+replay" in out


def test_wrong_wishes_are_refused(config, capsys):
    assert main(["mismatch", "--config", str(config), "--tokens", "0"]) == 2
    assert "--tokens" in capsys.readouterr().err
