"""Values as steps in units in the last place.

The bits of a float, read as an integer with the negative half turned over, are in the order of the
numbers: neighbors differ by one, over zero and over powers of two. One optimizer step moves a
weight by one or two such units, so the difference, folded to 0, 1, 2 ... by zigzag, is nearly
always one small code. All arithmetic wraps, so NaN payloads and infinities pass unharmed.
"""

import numpy as np

ESCAPE = 255
"""A code byte that says: the folded step stands in the escapes, in full."""
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32}


def ordered(bits: np.ndarray) -> np.ndarray:
    """Map bit patterns to integers in the order of the numbers; unsigned, same shape."""
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def from_ordered(rank: np.ndarray) -> np.ndarray:
    """Invert `ordered`."""
    sign = rank.dtype.type(1 << (8 * rank.itemsize - 1))
    return np.where(rank & sign, rank ^ sign, ~rank)


def encode_steps(base: np.ndarray, target: np.ndarray) -> tuple[bytes, bytes]:
    """Code changed values.

    Args:
        base: [K] bit patterns before.
        target: [K] bit patterns after; none equal to the base's.

    Returns:
        K code bytes, and the escaped steps at full width.

    """
    signed = _SIGNED[base.itemsize]
    step = (ordered(target) - ordered(base)).view(signed)
    folded = ((step << 1) ^ (step >> (8 * base.itemsize - 1))).view(base.dtype)
    folded -= base.dtype.type(1)
    codes = np.minimum(folded, ESCAPE).astype(np.uint8)
    return codes.tobytes(), folded[codes == ESCAPE].tobytes()


def decode_steps(base: np.ndarray, codes: np.ndarray, escapes: np.ndarray) -> np.ndarray:
    """Invert `encode_steps`.

    Raises:
        ValueError: the escapes are not as many as the codes say.

    """
    folded = codes.astype(base.dtype)
    folded[codes == ESCAPE] = escapes
    folded += base.dtype.type(1)
    one = base.dtype.type(1)
    step = (folded >> one) ^ (base.dtype.type(0) - (folded & one))
    return from_ordered(ordered(base) + step)
