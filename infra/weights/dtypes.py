"""The dtypes of safetensors, and the words that the delta codec sees of them.

A word is the unsigned integer of 1, 2 or 4 bytes that the codec works on: the element itself where
it has that size, half an element of 8 bytes, a byte of elements that are packed below a byte.
"""

import math

import msgspec
import numpy as np

BYTES = "BYTES"
"""Not of safetensors: bytes of a file that are no tensor (header, configuration, tokenizer)."""
_PACKED = "|u1"
WORD_DTYPES = {1: np.dtype(np.uint8), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


class Dtype(msgspec.Struct, frozen=True):
    """One dtype: its size, how numpy calls it, and where its exponent stands."""

    num_bits: int
    numpy_name: str
    """Enters the tensor's digest; floats that numpy lacks go by their bit pattern."""
    exponent: tuple[int, int] | None = None
    """Lowest bit and number of bits, of floats whose element is one word."""

    @property
    def word_bytes(self) -> int:
        """Return the size of a word: 1, 2 or 4."""
        return self.num_bits // 8 if self.num_bits in (16, 32) else 4 if self.num_bits == 64 else 1


DTYPES = {
    BYTES: Dtype(8, _PACKED),
    "BOOL": Dtype(8, "|b1"),
    "F4": Dtype(4, _PACKED),
    "F6_E2M3": Dtype(6, _PACKED),
    "F6_E3M2": Dtype(6, _PACKED),
    "U8": Dtype(8, "|u1"),
    "I8": Dtype(8, "|i1"),
    "F8_E4M3": Dtype(8, _PACKED, (3, 4)),
    "F8_E4M3FNUZ": Dtype(8, _PACKED, (3, 4)),
    "F8_E5M2": Dtype(8, _PACKED, (2, 5)),
    "F8_E5M2FNUZ": Dtype(8, _PACKED, (2, 5)),
    "F8_E8M0": Dtype(8, _PACKED),
    "I16": Dtype(16, "<i2"),
    "U16": Dtype(16, "<u2"),
    "F16": Dtype(16, "<f2", (10, 5)),
    "BF16": Dtype(16, "<u2", (7, 8)),
    "I32": Dtype(32, "<i4"),
    "U32": Dtype(32, "<u4"),
    "F32": Dtype(32, "<f4", (23, 8)),
    "I64": Dtype(64, "<i8"),
    "U64": Dtype(64, "<u8"),
    "F64": Dtype(64, "<f8"),
    "C64": Dtype(64, "<c8"),
}


def num_bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor.

    Raises:
        ValueError: an unknown dtype, a negative dimension, or packed elements that fill no byte.

    """
    known = DTYPES.get(dtype)
    if known is None:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if any(size < 0 for size in shape):
        raise ValueError(f"shape: expected sizes >= 0, got {list(shape)}")
    num_bits = math.prod(shape) * known.num_bits
    if num_bits % 8:
        raise ValueError(f"shape: {list(shape)} of {dtype} does not fill whole bytes")
    return num_bits // 8


def exponents(dtype: str, words: np.ndarray) -> np.ndarray | None:
    """Return the exponent fields [N] uint8 of words [N], or None for what has no exponent."""
    field = DTYPES[dtype].exponent
    if field is None:
        return None
    lowest, width = field
    return (words >> words.dtype.type(lowest) & words.dtype.type((1 << width) - 1)).astype(np.uint8)
