"""Values as steps in units in the last place.

The bits of a float, read as an integer with the negative half turned over, are in the order of the
numbers: neighbors differ by one, over zero and over powers of two. One optimizer step moves a
weight by one such unit, seldom more, up or down alike. So the signs go as plain bits, which steps
are larger than one as marks, and the sizes of those few as Rice codes. Integers step as they are.
All arithmetic wraps, so NaN payloads and infinities pass unharmed.
"""

import numpy as np

from penstock.kernels.delta.dtypes import Dtype

SMALLEST_LARGE = 2


def ordered(bits: np.ndarray) -> np.ndarray:
    """Map bit patterns of floats to integers in the order of the numbers; unsigned, same shape."""
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def from_ordered(rank: np.ndarray) -> np.ndarray:
    """Invert `ordered`."""
    sign = rank.dtype.type(1 << (8 * rank.itemsize - 1))
    return np.where(rank & sign, rank ^ sign, ~rank)


def steps_between(
    base: np.ndarray, target: np.ndarray, dtype: Dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each step goes down (bool [K]) and its size (unsigned [K], >= 1)."""
    mask, half = _mask_and_half(base, dtype)
    if dtype.traits.is_float:
        base, target = ordered(base), ordered(target)
    step = (target - base) & mask
    is_down = step >= half
    return is_down, np.where(is_down, (base.dtype.type(0) - step) & mask, step)


def walk(base: np.ndarray, is_down: np.ndarray, sizes: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Invert `steps_between`: return the targets [K]."""
    mask, _ = _mask_and_half(base, dtype)
    step = np.where(is_down, base.dtype.type(0) - sizes, sizes)
    if dtype.traits.is_float:
        return from_ordered(ordered(base) + step)
    return (base + step) & mask


def _mask_and_half(array: np.ndarray, dtype: Dtype) -> tuple[np.generic, np.generic]:
    """Return all ones of an element's bits, and its highest bit alone."""
    bits = dtype.traits.bits
    return array.dtype.type((1 << bits) - 1), array.dtype.type(1 << (bits - 1))
