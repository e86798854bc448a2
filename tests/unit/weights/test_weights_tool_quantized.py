"""Quantized checkpoints: FP8 with its scales, and four-bit integers packed into bytes and words."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.golden.weights_reader import apply_to_file

from penstock.infra.cli import main
from penstock.infra.weights.files.delta_file import DeltaFile
from penstock.kernels import delta

BLOCK = 128


def weights(*arguments):
    return main(["weights", *map(str, arguments), "--threads", "1"])


def masters(step):
    """Return float32 weights that drift a little with every step."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(96, 2 * BLOCK, generator=generator) * 0.02
    for _ in range(step):
        made = made + 1e-5 * torch.randn(made.shape, generator=generator)
    return made


def fp8(made):
    """E4M3 with a scale of its own for each block of 128."""
    blocks = made.reshape(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 448
    codes = (blocks / scales).to(torch.float8_e4m3fn).reshape(made.shape)
    return {"up.weight": codes, "up.weight_scale_inv": scales}


def int4(made):
    """Two weights a byte, the first in the low half."""
    blocks = made.reshape(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 7
    codes = (blocks / scales).round().to(torch.int8).reshape(-1).view(torch.uint8) & 15
    return {"up.weight_packed": codes[::2] | codes[1::2] << 4, "up.weight_scale": scales}


def int4_in_words(made):
    """Eight weights an I32, as GPTQ, AWQ and compressed-tensors have it."""
    state = int4(made)
    return state | {"up.weight_packed": state["up.weight_packed"].view(torch.int32)}


@pytest.mark.parametrize(("quantize", "kind"), [
    (fp8, "FP8_E4M3"), (int4, "INT4X2"), (int4_in_words, "INT4X2"),
])  # fmt: skip
def test_a_quantized_checkpoint_comes_back_bit_for_bit(tmp_path, quantize, kind, capsys):
    paths = [tmp_path / f"{step}.safetensors" for step in range(3)]
    for step, path in enumerate(paths):
        save_file(quantize(masters(step)), path)
    deltas = [tmp_path / "a.delta", tmp_path / "b.delta"]
    for base, target, patch in zip(paths, paths[1:], deltas, strict=False):
        assert weights("diff", base, target, "-o", patch) == 0
        assert weights("apply", base, patch, "-o", tmp_path / "out") == 0
        assert (tmp_path / "out").read_bytes() == target.read_bytes()
        assert apply_to_file(base, patch) == target.read_bytes()
        assert weights("verify", target, patch) == 0
    assert weights("merge", paths[0], *deltas, "-o", tmp_path / "merged") == 0
    assert weights("apply", paths[0], tmp_path / "merged", "-o", tmp_path / "out") == 0
    assert (tmp_path / "out").read_bytes() == paths[2].read_bytes()
    capsys.readouterr()
    assert weights("inspect", deltas[0], "--base", paths[0], "--json") == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["tensors"]
    (packed,) = (row for row in rows if row["name"] in {"up.weight", "up.weight_packed"})
    old, new = (load_file(path)[packed["name"]].view(torch.uint8) for path in paths[:2])
    size = {"I32": 4}.get(packed["dtype"], 1)
    changed = (old.reshape(-1, size) != new.reshape(-1, size)).any(1)
    assert packed["share"]["num_changed"] == int(changed.sum()) > 0
    with DeltaFile(deltas[0]) as patch:
        numbers = range(len(patch.manifest.extents))
        kinds = {delta.read_header(patch.payload(number)).dtype.name for number in numbers}
    assert kind in kinds


def test_packed_words_take_half_of_what_whole_words_take(tmp_path):
    old, new = (int4_in_words(masters(step))["up.weight_packed"].numpy() for step in range(2))
    words = delta.encode(old.view(np.uint32), new.view(np.uint32), delta.Dtype.INT32)
    save_file(int4_in_words(masters(0)), tmp_path / "a")
    save_file(int4_in_words(masters(1)), tmp_path / "b")
    assert weights("diff", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "d") == 0
    with DeltaFile(tmp_path / "d") as patch:
        names = [patch.manifest.target[e.row].name for e in patch.manifest.extents]
        payload = patch.payload(names.index("up.weight_packed"))
    assert len(payload) < 0.65 * len(words)


def test_whole_integers_are_not_taken_for_packed_ones(tmp_path):
    rng = np.random.default_rng(0)
    for number, dtype in enumerate((torch.int8, torch.int32)):
        old = torch.from_numpy(rng.integers(-100, 100, 20_000)).to(dtype)
        step = torch.from_numpy(rng.integers(-1, 2, 20_000) * (rng.random(20_000) < 0.1))
        save_file({"w": old}, tmp_path / "a")
        save_file({"w": old + step.to(dtype)}, tmp_path / "b")
        assert weights("diff", tmp_path / "a", tmp_path / "b", "-o", tmp_path / f"{number}") == 0
        with DeltaFile(tmp_path / f"{number}") as patch:
            kinds = {
                delta.read_header(patch.payload(n)).dtype
                for n in range(len(patch.manifest.extents))
            }
        assert delta.Dtype.INT4X2 not in kinds
