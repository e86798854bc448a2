"""Element types of the delta codecs, and their properties.

Arrays hold bit patterns as unsigned integers of the element size. The element type defines the
distance between two patterns (in units in the last place, or as integers) and, for floats, which
bits are the exponent.
"""

from enum import IntEnum

import msgspec
import numpy as np


class Dtype(IntEnum):
    """Type of an array's elements; the numbers are part of payloads."""

    INT8 = 0
    """8-bit integers, signed or not, and bool."""
    INT16 = 1
    INT32 = 2
    INT64 = 3
    BF16 = 4
    FP16 = 5
    FP32 = 6
    FP64 = 7
    FP8_E4M3 = 8
    """E4M3 floats without infinities; their scales are a separate tensor."""
    INT4X2 = 9
    """4-bit integers, two per byte, the first in the low bits."""

    @classmethod
    def of(cls, array: np.ndarray) -> "Dtype":
        """Return the default type of an array of bit patterns.

        Raises:
            ValueError: The array does not hold unsigned integers.

        """
        if array.dtype not in _USUAL:
            names = ", ".join(str(dtype) for dtype in _USUAL)
            raise ValueError(f"expected an array of one of {names}, got {array.dtype}")
        return _USUAL[array.dtype]

    @property
    def traits(self) -> "Traits":
        """Properties that the codecs use."""
        return _TRAITS[self]

    @property
    def storage(self) -> np.dtype:
        """NumPy dtype of arrays of this type."""
        return np.dtype(f"u{self.traits.itemsize}")


class Traits(msgspec.Struct, frozen=True):
    """Properties of an element type."""

    itemsize: int
    """Bytes of an element in memory; for INT4X2, of a pair of elements."""
    bits: int
    """Bits of an element."""
    is_float: bool = False
    """Whether elements are floats, with a sign bit and a magnitude, instead of integers."""
    key_shift: int = 0
    """Number of bits below the exponent."""
    num_keys: int = 1
    """Number of exponents; 1 for types without classes."""

    @property
    def has_steps(self) -> bool:
        """Whether changes can be coded as steps; 8-byte elements only support raw and xor."""
        return self.bits <= 32


_TRAITS = {
    Dtype.INT8: Traits(1, 8),
    Dtype.INT16: Traits(2, 16),
    Dtype.INT32: Traits(4, 32),
    Dtype.INT64: Traits(8, 64),
    Dtype.BF16: Traits(2, 16, True, 7, 256),
    Dtype.FP16: Traits(2, 16, True, 10, 32),
    Dtype.FP32: Traits(4, 32, True, 23, 256),
    Dtype.FP64: Traits(8, 64, True),
    Dtype.FP8_E4M3: Traits(1, 8, True, 3, 16),
    Dtype.INT4X2: Traits(1, 4),
}
_USUAL = {
    np.dtype(np.uint8): Dtype.INT8,
    np.dtype(np.uint16): Dtype.BF16,
    np.dtype(np.uint32): Dtype.FP32,
    np.dtype(np.uint64): Dtype.INT64,
}


def unpack_nibbles(array: np.ndarray) -> np.ndarray:
    """Return the elements of an INT4X2 array [N] as uint8 [2 * N]."""
    return np.stack([array & np.uint8(15), array >> np.uint8(4)], axis=1).reshape(-1)


def pack_nibbles(halves: np.ndarray) -> np.ndarray:
    """Invert `unpack_nibbles`."""
    return halves[::2] | halves[1::2] << np.uint8(4)


def exponent_keys(bits: np.ndarray, dtype: Dtype = Dtype.BF16) -> np.ndarray:
    """Return the exponents of bit patterns, as uint8 of the same shape."""
    traits = dtype.traits
    shift = bits.dtype.type(traits.key_shift)
    return ((bits >> shift) & bits.dtype.type(traits.num_keys - 1)).astype(np.uint8)
