"""The dtypes of safetensors, and the words that the delta codec sees of them.

A word is the unsigned integer of 1, 2 or 4 bytes that the codec works on: the element itself where
it has that size, half an element of 8 bytes, a byte of elements that are packed below a byte.
"""

import math

import msgspec
import numpy as np

from penstock.kernels.delta import Dtype as Kind

BYTES = "BYTES"
"""Not of safetensors: bytes of a file that are no tensor (header, configuration, tokenizer)."""
_PACKED = "|u1"
_DIMENSIONS_MAX = 64
WORD_DTYPES = {1: np.dtype(np.uint8), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


class Dtype(msgspec.Struct, frozen=True):
    """One dtype: its size, how numpy calls it, and what the codec takes its words for."""

    num_bits: int
    numpy_name: str
    """Enters the tensor's digest; floats that numpy lacks go by their bit pattern."""
    kind: Kind

    @property
    def word_bytes(self) -> int:
        """Return the size of a word: 1, 2 or 4."""
        return self.num_bits // 8 if self.num_bits in (16, 32) else 4 if self.num_bits == 64 else 1


DTYPES = {
    BYTES: Dtype(8, _PACKED, Kind.INT8),
    "BOOL": Dtype(8, "|b1", Kind.INT8),
    "F4": Dtype(4, _PACKED, Kind.INT8),
    "F6_E2M3": Dtype(6, _PACKED, Kind.INT8),
    "F6_E3M2": Dtype(6, _PACKED, Kind.INT8),
    "U8": Dtype(8, "|u1", Kind.INT8),
    "I8": Dtype(8, "|i1", Kind.INT8),
    "F8_E4M3": Dtype(8, _PACKED, Kind.FP8_E4M3),
    "F8_E4M3FNUZ": Dtype(8, _PACKED, Kind.FP8_E4M3),
    "F8_E5M2": Dtype(8, _PACKED, Kind.INT8),
    "F8_E5M2FNUZ": Dtype(8, _PACKED, Kind.INT8),
    "F8_E8M0": Dtype(8, _PACKED, Kind.INT8),
    "I16": Dtype(16, "<i2", Kind.INT16),
    "U16": Dtype(16, "<u2", Kind.INT16),
    "F16": Dtype(16, "<f2", Kind.FP16),
    "BF16": Dtype(16, "<u2", Kind.BF16),
    "I32": Dtype(32, "<i4", Kind.INT32),
    "U32": Dtype(32, "<u4", Kind.INT32),
    "F32": Dtype(32, "<f4", Kind.FP32),
    "I64": Dtype(64, "<i8", Kind.INT32),
    "U64": Dtype(64, "<u8", Kind.INT32),
    "F64": Dtype(64, "<f8", Kind.INT32),
    "C64": Dtype(64, "<c8", Kind.INT32),
}


def num_bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor.

    Raises:
        ValueError: an unknown dtype, more than 64 dimensions, a negative one, or packed elements
            that fill no byte.

    """
    known = DTYPES.get(dtype)
    if known is None:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if len(shape) > _DIMENSIONS_MAX:
        raise ValueError(f"shape: expected at most {_DIMENSIONS_MAX} sizes, got {len(shape)}")
    if any(size < 0 for size in shape):
        raise ValueError(f"shape: expected sizes >= 0, got {list(shape)}")
    num_bits = math.prod(shape) * known.num_bits
    if num_bits % 8:
        raise ValueError(f"shape: {list(shape)} of {dtype} does not fill whole bytes")
    return num_bits // 8


def exponents(dtype: str, words: np.ndarray) -> np.ndarray | None:
    """Return the exponent fields [N] uint8 of words [N], or None for what has no exponent."""
    traits = DTYPES[dtype].kind.traits
    if traits.num_keys == 1:
        return None
    field = words >> words.dtype.type(traits.key_shift)
    return (field & words.dtype.type(traits.num_keys - 1)).astype(np.uint8)
