"""Delta files of every version stay readable, by the tool and by a reader of the format alone."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.infra.cli import main

FOLDER = Path(__file__).parent
GOLDEN = FOLDER / "weights_v1"


def load_reader():
    spec = importlib.util.spec_from_file_location("weights_reader", FOLDER / "weights_reader.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.apply_to_file


apply_to_file = load_reader()


def make_pair(folder, seed):
    """Write a small pair with every fate of a tensor; return both paths."""
    rng = np.random.default_rng(seed)
    bits = (rng.standard_normal(3000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    base = {
        "layers.0.half": (bits.view(np.uint16) & 0xFBFF).view(np.float16),
        "layers.1.full": rng.standard_normal((20, 30)).astype(np.float32),
        "bytes": rng.integers(0, 256, 900, np.uint8),
        "still": np.arange(50, dtype=np.int64),
        "gone": np.ones(5, np.float32),
    }
    target = {name: array.copy() for name, array in base.items() if name != "gone"}
    target["layers.0.half"].view(np.uint16)[::31] += 1
    target["layers.1.full"] = target["layers.1.full"].reshape(600)
    target["layers.1.full"].view(np.uint32)[::7] -= 3
    target["bytes"][100:300] = 7
    target["new"] = rng.standard_normal(40)
    target["scalar"] = np.array(-0.0, np.float32)
    target["empty"] = np.zeros((3, 0), np.int16)
    paths = folder / "base.safetensors", folder / "next.safetensors"
    save_file(base, paths[0], {"step": "1"})
    save_file(target, paths[1], {"step": "2"})
    return paths


@pytest.mark.parametrize("delta", sorted(GOLDEN.glob("*.psdelta")), ids=lambda path: path.stem)
def test_a_golden_delta_decodes_to_the_same_file(delta, tmp_path):
    base, expected = GOLDEN / "base.safetensors", (GOLDEN / "next.safetensors").read_bytes()
    assert main(["weights", "apply", str(base), str(delta), "-o", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out").read_bytes() == expected
    assert apply_to_file(base, delta) == expected


def test_there_is_a_golden_delta():
    assert (GOLDEN / "diff.psdelta").exists()


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_written_today_is_what_the_format_says(seed, tmp_path):
    base, target = make_pair(tmp_path, seed)
    delta = tmp_path / "delta"
    assert main(["weights", "diff", str(base), str(target), "-o", str(delta)]) == 0
    assert apply_to_file(base, delta) == target.read_bytes()
