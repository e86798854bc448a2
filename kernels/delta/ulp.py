"""Values as steps in units in the last place.

The bits of a float, read as an integer with the negative half turned over, are in the order of the
numbers: neighbors differ by one, over zero and over powers of two. One optimizer step moves a
weight by one such unit, seldom more, up or down alike. So the signs go as plain bits; which steps
are larger than one goes as marks (`gaps.py`); the sizes of those few go as bytes. All arithmetic
wraps, so NaN payloads and infinities pass unharmed.
"""

import numpy as np

ESCAPE = 255
"""A size byte that says: the size stands in the escapes, in full."""
SMALLEST_LARGE = 2
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32}


def ordered(bits: np.ndarray) -> np.ndarray:
    """Map bit patterns to integers in the order of the numbers; unsigned, same shape."""
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def from_ordered(rank: np.ndarray) -> np.ndarray:
    """Invert `ordered`."""
    sign = rank.dtype.type(1 << (8 * rank.itemsize - 1))
    return np.where(rank & sign, rank ^ sign, ~rank)


def steps_between(base: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each step goes down (bool [K]) and its size (unsigned [K], >= 1)."""
    step = ordered(target) - ordered(base)
    is_down = step.view(_SIGNED[base.itemsize]) < 0
    return is_down, np.where(is_down, base.dtype.type(0) - step, step)


def walk(base: np.ndarray, is_down: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Invert `steps_between`: return the targets [K]."""
    step = np.where(is_down, base.dtype.type(0) - sizes, sizes)
    return from_ordered(ordered(base) + step)


def encode_sizes(sizes: np.ndarray) -> tuple[bytes, bytes]:
    """Code large sizes [M]: M bytes, and the escaped ones at full width; 2 is 0."""
    rest = sizes - sizes.dtype.type(SMALLEST_LARGE)
    codes = np.minimum(rest, ESCAPE).astype(np.uint8)
    return codes.tobytes(), rest[codes == ESCAPE].tobytes()


def decode_sizes(codes: np.ndarray, escapes: np.ndarray) -> np.ndarray:
    """Invert `encode_sizes`; the escapes' dtype is the result's.

    Raises:
        ValueError: the escapes are not as many as the codes say.

    """
    rest = codes.astype(escapes.dtype)
    rest[codes == ESCAPE] = escapes
    return rest + escapes.dtype.type(SMALLEST_LARGE)
