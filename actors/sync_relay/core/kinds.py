"""What the elements of a snapshot are: how each kind is laid out, coded, and named in a manifest.

A table of tensors names numpy dtypes; where numpy has none, arrays are of unsigned integers whose
dtype says what they hold (`runtime.snapshots`), and the table names that.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from penstock.actors.policy.snapshot import E8M0, FP8_E4M3, element_kind
from penstock.kernels.delta import Dtype


class Kind(NamedTuple):
    """One row of the kinds."""

    name: str
    """In manifests."""
    coded_as: Dtype
    storage: np.dtype


KINDS = {
    "<u2": Kind("bf16", Dtype.BF16, np.dtype("<u2")),
    "<f2": Kind("fp16", Dtype.FP16, np.dtype("<f2")),
    "<f4": Kind("fp32", Dtype.FP32, np.dtype("<f4")),
    "<u4": Kind("fp32", Dtype.FP32, np.dtype("<u4")),
    "<i4": Kind("int32", Dtype.INT32, np.dtype("<i4")),
    "<i2": Kind("int16", Dtype.INT16, np.dtype("<i2")),
    "|i1": Kind("int8", Dtype.INT8, np.dtype("|i1")),
    "|u1": Kind("int8", Dtype.INT8, np.dtype("|u1")),
    "|b1": Kind("int8", Dtype.INT8, np.dtype("|b1")),
    "fp8_e4m3": Kind("fp8_e4m3", Dtype.FP8_E4M3, FP8_E4M3),
    "e8m0": Kind("e8m0", Dtype.INT8, E8M0),
}
"""By what stands in the table."""
_BLOCK_SCALED = {"fp8_e4m3", "e8m0"}
"""Elements and the scales of their blocks: together they are MXFP8."""


def dtype_name(array: np.ndarray) -> str:
    """Return what stands in the table for an array's elements."""
    return element_kind(array) or array.dtype.str


def kind_of(dtype: str) -> Kind:
    """Return a kind by its name in the table.

    Raises:
        ValueError: there is no codec for it.

    """
    if dtype not in KINDS:
        raise ValueError(f"dtype {dtype}: has no delta codec, expected one of {', '.join(KINDS)}")
    return KINDS[dtype]


def representation(num_elements: Counter[str]) -> str:
    """Name what a snapshot holds, by the elements of each dtype: the most first.

    Example: `bf16`, `mxfp8+bf16`, `fp8_e4m3+fp32`.
    """
    counts: Counter[str] = Counter()
    for dtype, count in num_elements.items():
        counts[kind_of(dtype).name] += count
    if counts.keys() >= _BLOCK_SCALED:
        counts["mxfp8"] = sum(counts.pop(name) for name in _BLOCK_SCALED)
    return "+".join(sorted(counts, key=lambda name: (-counts[name], name)))
