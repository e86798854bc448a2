"""Patches: absolute overwrites of a flat array."""

from collections.abc import Sequence

import msgspec
import numpy as np


class Patch(msgspec.Struct, frozen=True):
    """Absolute overwrites of a flat array: writing them twice does no harm."""

    flat_indices: np.ndarray
    """[K] int64, rising, each once."""
    values: np.ndarray
    """[K] bit patterns."""


def apply_into(array: np.ndarray, patch: Patch) -> None:
    """Write a patch over an array of bit patterns, in place.

    Args:
        array: contiguous, of any shape, of the patch's dtype.
        patch: places in C order, and their new values.

    Raises:
        ValueError: the patch is of another dtype or reaches over the end; nothing was written.

    """
    if array.dtype != patch.values.dtype or not array.flags.c_contiguous:
        raise ValueError(
            f"expected a contiguous array of {patch.values.dtype}, got {array.dtype}"
            f"{'' if array.flags.c_contiguous else ', strided'}"
        )
    places = patch.flat_indices
    if places.size and (int(places[0]) < 0 or int(places[-1]) >= array.size):
        raise ValueError(f"the patch reaches from {places[0]} to {places[-1]} of {array.size}")
    array.reshape(-1)[patch.flat_indices] = patch.values


def compose(patches: Sequence[Patch]) -> Patch:
    """Return one patch that does what several do one after the other.

    Args:
        patches: at least one, the oldest first, of one dtype.

    """
    indices = np.concatenate([patch.flat_indices for patch in patches])
    values = np.concatenate([patch.values for patch in patches])
    order = np.argsort(indices, kind="stable")
    indices = indices[order]
    is_last = np.append(indices[1:] != indices[:-1], True)[: indices.size]
    return Patch(indices[is_last], values[order][is_last])


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
