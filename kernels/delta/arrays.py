"""Checks of the arrays that codecs take, and patches of arrays."""

import msgspec
import numpy as np
import xxhash

from penstock.kernels.delta.dtypes import Dtype
from penstock.kernels.delta.header import NUM_ELEMENTS_MAX


class Patch(msgspec.Struct, frozen=True):
    """Elements to overwrite in a flat array; applying a patch twice is harmless."""

    flat_indices: np.ndarray
    """int64 [K]: flat indices, strictly rising."""
    values: np.ndarray
    """[K]: new bit patterns."""


def patch_between(base: np.ndarray, target: np.ndarray) -> Patch:
    """Return the patch that turns one flat array into another."""
    places = np.flatnonzero(base != target)
    return Patch(places, target[places])


def join_nibbles(patch: Patch, base: np.ndarray) -> Patch:
    """Convert a patch of the 4-bit halves of `base` (uint8 [N]) to one of its bytes."""
    # The unchanged half of each byte is taken from the base.
    places = np.unique(patch.flat_indices >> 1)
    values = base[places]
    for half in (0, 1):
        is_half = (patch.flat_indices & 1) == half
        where = np.searchsorted(places, patch.flat_indices[is_half] >> 1)
        kept = values[where] & np.uint8(0x0F if half else 0xF0)
        values[where] = kept | (patch.values[is_half] << np.uint8(4 * half))
    return Patch(places, values)


def check_of(array: np.ndarray) -> int:
    """Return the xxh3-64 checksum of a contiguous array's bytes."""
    return xxhash.xxh3_64_intdigest(array.reshape(-1).data)


def check_pair(base: np.ndarray, target: np.ndarray, dtype: Dtype | None) -> Dtype:
    """Check base and target, and return their element type, by default that of their dtype.

    Raises:
        ValueError: The arrays are not contiguous, differ in shape, or do not have the storage type
            of the element type.

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
    """Check and return memory for a target.

    Raises:
        ValueError: `out` has another shape or dtype than the base, is not contiguous, or overlaps
            the base.

    """
    if out.shape != base.shape or out.dtype != base.dtype or not out.flags.c_contiguous:
        raise ValueError(
            f"out: expected a contiguous {base.dtype}{base.shape}, got {out.dtype}{out.shape}"
        )
    if np.may_share_memory(base, out):
        raise ValueError("out: expected memory that does not overlap the base")
    return out
