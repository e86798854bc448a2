"""`mismatch`, by fresh weights: what it measures and how it prints that."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.lab.__main__ import main
from tests.lab.mismatch.formats import compare_formats

from penstock import infra
from penstock.actors.trainer.config import MidtrainConfig
from penstock.actors.trainer.midtraining.corpus import Corpus
from penstock.infra.config.file import load_config
from penstock.kernels import native
from penstock.messages.errors import ConfigError

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
max_position_embeddings = 1024
"""


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_modes_and_remedies_are_reported_in_two_objects(config, capsys):
    assert main(["mismatch", "--config", str(config), "--tokens", "200", "--json"]) == 0
    figures, short = map(json.loads, capsys.readouterr().out.splitlines()[-2:])
    exact, fast, off = (figures[mode] for mode in ("exact", "fast", "off"))
    names = ["tokens", "kl_k1", "kl_k3", "logprob_abs_diff_max"]
    assert {mode: list(row) for mode, row in short.items()} == dict.fromkeys(
        ("exact", "fast", "off"), names
    )
    assert all(short[mode][name] == figures[mode][name] for mode in short for name in names)
    assert exact["tokens"] >= 200
    assert exact["kl_k1"] == exact["kl_k3"] == exact["logprob_abs_diff_max"] == 0.0
    assert 0.0 < fast["logprob_abs_diff_max"] < off["logprob_abs_diff_max"]
    assert exact["flips_per_layer"] == fast["flips_per_layer"] == [0.0, 0.0]
    assert fast["first_layer"]["layer"] == 0
    assert 0.9 < fast["kl_removed"] < exact["kl_removed"] == 1.0
    for row in figures["remedies"]:
        assert not row["replay"] or row["flips_per_layer"] == [0.0, 0.0]
    assert figures["routes"]["sealed"] < figures["routes"]["raw"]


def test_a_table_is_for_people(config, capsys):
    assert main(["mismatch", "--config", str(config), "--tokens", "50"]) == 0
    out = capsys.readouterr().out
    assert "exact" in out and "bfloat16 between layers: fp32_gate+replay" in out
    assert "off: first difference: layer 0, token" in out
    assert "decoding 64 rows: recording routes takes" in out


def test_a_dense_model_has_no_routes_to_report(config, capsys):
    dense = "num_experts = 0\nnum_experts_per_tok = 0\nintermediate_size = 48\n"
    config.write_text(TINY + dense)
    assert main(["mismatch", "--config", str(config), "--tokens", "50", "--json"]) == 0
    figures, short = map(json.loads, capsys.readouterr().out.splitlines()[-2:])
    assert short["exact"]["logprob_abs_diff_max"] == 0.0
    assert figures["fast"]["logprob_abs_diff_max"] > 0.0
    assert figures["routes"]["sealed"] == 0.0


def test_formats_are_compared_and_foreign_trainers_are_far_off(config):
    rng = np.random.default_rng(0)
    tokens = np.tile(rng.integers(0, 300, 20), 60)
    corpus = Corpus(tokens=tokens)
    compared = compare_formats(
        load_config(config).policy,
        MidtrainConfig(sequence_tokens=64, batch_tokens=256, pass_tokens=128),
        corpus,
        corpus,
        num_tokens=1536,
        prompts=[tokens[:40]],
        num_sampled=1,
    )
    rows = list(compared)
    assert [row["expert_format"] for row in rows] == ["bf16", "mxfp8", "nvfp4"]
    for row in rows:
        assert row["losses"][-1] < row["losses"][0]
        assert len(row["unmatched"]) == 2
        for foreign in row["unmatched"].values():
            assert foreign["kl_k3"] > 100 * row["mismatch"]["kl_k3"]


def test_wrong_wishes_are_refused(config, capsys):
    assert main(["mismatch", "--config", str(config), "--tokens", "0"]) == 2
    assert "--tokens" in capsys.readouterr().err


def test_the_mxfp8_quickstart_is_the_quickstart_but_for_the_format():
    folder = Path(infra.__file__).parent / "configs"
    plain = load_config(folder.parents[1] / "examples" / "quickstart" / "config.toml")
    mxfp8 = load_config(folder / "quickstart-mxfp8.toml")
    assert mxfp8.policy.numerics.expert_format == "mxfp8"
    assert structs.replace(mxfp8, policy=plain.policy) == plain


def test_a_base_has_no_base(tmp_path, config):
    (tmp_path / "one.toml").write_text('base = "tiny.toml"\n[policy]\nhidden_size = 64\n')
    (tmp_path / "two.toml").write_text('base = "one.toml"\n')
    assert load_config(tmp_path / "one.toml").policy.hidden_size == 64
    assert load_config(tmp_path / "one.toml").policy.vocab_size == 300
    with pytest.raises(ConfigError, match="without a base"):
        load_config(tmp_path / "two.toml")
    (tmp_path / "three.toml").write_text('base = "none.toml"\n')
    with pytest.raises(ConfigError, match="no such configuration"):
        load_config(tmp_path / "three.toml")
