"""The kernel writes the payloads' changes: staged apply by every dtype.

The CUDA sources run on the CPU here. What the codec decodes they write: the new bit patterns at a
patch's positions, nothing else.
"""

import numpy as np
import pytest
import torch
from tests.simt.shim import SIMT

from penstock.kernels import delta, ops
from penstock.kernels.backend import KernelArgumentError
from penstock.kernels.delta import Dtype

TORCH_DTYPES = {
    Dtype.INT8: torch.int8,
    Dtype.INT16: torch.int16,
    Dtype.INT32: torch.int32,
    Dtype.BF16: torch.bfloat16,
    Dtype.FP16: torch.float16,
    Dtype.FP32: torch.float32,
    Dtype.FP8_E4M3: torch.float8_e4m3fn,
    Dtype.INT4X2: torch.uint8,
}
NUM_ELEMENTS = 2 * 4096 + 37
"""Two whole tiles of the kernel and a rest."""
SPECIAL = {
    1: [0x00, 0x80, 0x7F, 0xFF, 0x01, 0x81],
    2: [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0x7F81, 0xFFFF, 0x0001, 0x7C00, 0xFC00],
    4: [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF],
}
"""Zeros of both signs, infinities, NaNs that differ in their payload alone."""


def pair(kind, fraction):
    """Return two versions of an array of bits, the special ones among them, changed and not."""
    rng = np.random.default_rng(int(kind) + round(100 * fraction))
    itemsize = kind.storage.itemsize
    base = rng.integers(0, 1 << (8 * itemsize), NUM_ELEMENTS, np.uint64).astype(kind.storage)
    special = np.array(SPECIAL[itemsize], kind.storage)
    base[: special.size] = special
    target = np.where(rng.random(base.size) < fraction, base + 1, base).astype(kind.storage)
    if fraction:
        target[: special.size] = np.roll(special, 1)
    return base, target


def as_tensor(bits, kind):
    signed = bits.view(f"i{bits.itemsize}") if bits.itemsize > 1 else bits
    return torch.from_numpy(signed.copy()).view(TORCH_DTYPES[kind])


def as_bits(tensor, kind):
    names = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(names[tensor.element_size()]).numpy().view(kind.storage)


@pytest.mark.parametrize("backend", [SIMT, None], ids=["simt", "reference"])
@pytest.mark.parametrize("fraction", [0.0, 0.03, 1.0])
@pytest.mark.parametrize("kind", TORCH_DTYPES, ids=lambda kind: kind.name)
def test_kernels_write_what_payloads_hold(kind, fraction, backend):
    base, target = pair(kind, fraction)
    patch = delta.decode(base, delta.encode(base, target, kind))
    old = as_tensor(base, kind)
    staged = torch.from_numpy(patch.flat_indices.astype(np.int32))
    for _ in range(2):
        ops.delta_apply(old, staged, as_tensor(patch.values, kind), backend=backend)
        np.testing.assert_array_equal(as_bits(old, kind), target)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_elements_of_eight_bytes_are_refused_by_name(dtype):
    weights, none = torch.zeros(4, dtype=dtype), torch.zeros(0, dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match=r"weights: expected .*float8_e4m3fn.*64"):
        ops.delta_apply(weights, none, weights[:0])
