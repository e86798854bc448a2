"""Which arrays the codecs take."""

import numpy as np

from penstock.kernels.delta.dtypes import Dtype
from penstock.kernels.delta.header import NUM_ELEMENTS_MAX


def check_pair(base: np.ndarray, target: np.ndarray, dtype: Dtype | None) -> Dtype:
    """Return the kind of a base's and a target's elements, by default that of their dtype.

    Raises:
        ValueError: not two contiguous arrays of one shape and of the kind's storage type.

    """
    if base.shape != target.shape or base.dtype != target.dtype:
        raise ValueError(
            f"expected two arrays of one shape and dtype, got {base.dtype}{base.shape}"
            f" and {target.dtype}{target.shape}"
        )
    dtype = Dtype.of(base) if dtype is None else dtype
    if base.dtype != dtype.storage or base.size > NUM_ELEMENTS_MAX:
        raise ValueError(
            f"expected at most {NUM_ELEMENTS_MAX} elements of {dtype.storage} for {dtype.name},"
            f" got {base.size} of {base.dtype}"
        )
    if not (base.flags.c_contiguous and target.flags.c_contiguous):
        raise ValueError("expected contiguous arrays, got strided ones")
    return dtype


def check_out(base: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Return memory for a target, of the base's shape and dtype and apart from it.

    Raises:
        ValueError: it is not.

    """
    if out.shape != base.shape or out.dtype != base.dtype or not out.flags.c_contiguous:
        raise ValueError(
            f"out: expected a contiguous {base.dtype}{base.shape}, got {out.dtype}{out.shape}"
        )
    if np.may_share_memory(base, out):
        raise ValueError("out: expected memory apart from the base's")
    return out
