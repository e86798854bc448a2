"""The bench of delta codecs: its result's shape, and that no codec loses a bit."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch
from tests.lab.__main__ import main
from tests.lab.bench.codecs import measure, scaling
from tests.lab.bench.codecs.measure import CodecFigures, PairFigures, entropy_bound_bytes
from tests.lab.bench.codecs.pairs import read_pair
from tests.lab.bench.codecs.report import bars
from tests.lab.bench.codecs.scaling import shard_scaling

from penstock.kernels.delta import Dtype

FIGURES = {"ratio", "encode_gb_s", "decode_gb_s", "bit_exact"}


@pytest.fixture
def pair(tmp_path):
    generator = torch.Generator().manual_seed(0)
    masters = {name: 0.02 * torch.randn(400_000, generator=generator) for name in "ab"}
    for number, path in enumerate(("base", "next")):
        step = 3e-6 * number * torch.randn(400_000, generator=generator)
        state = {name: (master + step).bfloat16() for name, master in masters.items()}
        save_torch(state | {"count": torch.tensor([number])}, tmp_path / path)
    return tmp_path / "base", tmp_path / "next"


def test_the_last_line_holds_every_codec(pair, capsys, monkeypatch):
    monkeypatch.setattr(measure, "_SPAN_S", 0.001)  # Times are not looked at here.
    monkeypatch.setattr(scaling, "_BYTES", 1 << 20)
    base, target = map(str, pair)
    assert main(["weights", "--base", base, "--next", target, "--json"]) == 0
    output = capsys.readouterr()
    result = json.loads(output.out.splitlines()[-1])
    codecs = result["codecs"]
    assert {"ladder", "xor_zstd", "raw"} <= codecs.keys()
    assert {"arc_v2", "arc_v3"} <= codecs.keys() | result["missing"].keys()
    assert all(set(figures) == FIGURES and figures["bit_exact"] for figures in codecs.values())
    assert codecs["ladder"]["ratio"] >= 0.98 * max(f["ratio"] for f in codecs.values())
    assert 0 < result["changed_fraction"] < 1 and result["entropy_bound_ratio"] > 1
    assert result["threads"].keys() == {"1", "2"}
    ratios = [result["shards"][number]["ratio"] for number in ("1", "2", "8")]
    assert ratios == sorted(ratios, reverse=True) and ratios[-1] > 0.9 * ratios[0]
    assert "entropy bound" in output.err and "bit-exact" in output.err


def test_the_smallest_weights_are_not_repeated_for_ever(tmp_path):
    for number in range(2):
        save_file({"a": np.array([1, 2, 3 + number], np.float16)}, tmp_path / str(number))
    found = shard_scaling(read_pair(tmp_path / "0", tmp_path / "1"))
    assert [found[number].ratio > 0 for number in ("1", "2", "8")] == [True] * 3


def test_a_pair_needs_both_of_its_paths(pair, capsys):
    assert main(["weights", "--base", str(pair[0])]) == 2
    assert "--next" in capsys.readouterr().err


def test_checkpoints_without_a_common_tensor_are_refused(pair, tmp_path, capsys):
    save_file({"other": np.zeros(3)}, tmp_path / "other")
    arguments = ["--base", str(pair[0]), "--next", str(tmp_path / "other")]
    assert main(["weights", *arguments]) == 2
    assert "no tensor in common" in capsys.readouterr().err


def test_bars_are_met_or_missed_by_their_figures():
    def figures(ratio):
        return CodecFigures(ratio=ratio, encode_gb_s=1.2, decode_gb_s=0.9, bit_exact=True)

    pair = PairFigures(
        num_bytes=1,
        changed_fraction=0.05,
        entropy_bound_ratio=100.0,
        codecs={"ladder": figures(90.0), "class_gap_ulp": figures(90.0), "arc_v2": figures(36.0),
                "arc_v3": figures(60.0)},
    )  # fmt: skip
    met = [is_met for *_, is_met in bars("x", pair)]
    assert met == [True, False, True, False, True, False, True]


def test_the_bound_counts_mask_and_step_given_the_exponent():
    """Half of one exponent's elements step by one: a bit each; the other exponent is still."""
    base = np.repeat(np.array([0x3F80, 0x4000], np.uint16), 800)
    target = base.copy()
    target[:800:2] += 1
    assert entropy_bound_bytes(base, target) == pytest.approx(100.0)
    assert entropy_bound_bytes(base, base) == 0.0
    assert entropy_bound_bytes(base, target, Dtype.INT16) > 100.0
