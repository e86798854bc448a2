"""The arrays that the codecs take, their checks, and patches of them."""

import msgspec
import numpy as np
import xxhash

from penstock.kernels.delta.dtypes import Dtype
from penstock.kernels.delta.header import NUM_ELEMENTS_MAX


class Patch(msgspec.Struct, frozen=True):
    """Absolute overwrites of a flat array: writing them twice does no harm."""

    flat_indices: np.ndarray
    """[K] int64, strictly rising."""
    values: np.ndarray
    """[K] bit patterns."""


def patch_between(base: np.ndarray, target: np.ndarray) -> Patch:
    """Return what turns one flat array into another."""
    places = np.flatnonzero(base != target)
    return Patch(places, target[places])


def join_nibbles(patch: Patch, base: np.ndarray) -> Patch:
    """Turn a patch of the half bytes of `base` (uint8 [N]) into one of its bytes."""
    places = np.unique(patch.flat_indices >> 1)
    values = base[places]
    for half in (0, 1):
        own = (patch.flat_indices & 1) == half
        where = np.searchsorted(places, patch.flat_indices[own] >> 1)
        kept = values[where] & np.uint8(0x0F if half else 0xF0)
        values[where] = kept | (patch.values[own] << np.uint8(4 * half))
    return Patch(places, values)


def check_of(array: np.ndarray) -> int:
    """Return the xxh3-64 of a contiguous array's bytes."""
    return xxhash.xxh3_64_intdigest(array.reshape(-1).data)


def check_pair(base: np.ndarray, target: np.ndarray, dtype: Dtype | None) -> Dtype:
    """Check a base and a target; return their element type, by default that of their dtype.

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
    """Check memory for a target: of the base's shape and dtype, apart from it.

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
