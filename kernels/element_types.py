"""Table of tensor element types, named as in safetensors, that all other code looks up.

The delta codec works on words, which are unsigned integers of 1, 2 or 4 bytes: an element of that
size, half of an 8-byte element, or a byte that holds several smaller elements.
To add a type, add a row to `ELEMENT_TYPES`.
"""

import math
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.kernels.delta.dtypes import Dtype

BYTES = "BYTES"
"""Type of file contents that are not tensors (header, configuration, tokenizer); ours, not from
safetensors."""
_NAME = "element_type"
_BYTE = "|u1"
_DIMENSIONS_MAX = 64


class ElementType(NamedTuple):
    """Row of the table."""

    name: str
    num_bits: int
    numpy_name: str
    """NumPy type string, part of tensor digests; that of the bits for floats that NumPy lacks."""
    dtype: Dtype
    """Type as which the delta codec treats the words."""

    @property
    def word_bytes(self) -> int:
        """Size of a word in bytes: 1, 2 or 4."""
        return self.num_bits // 8 if self.num_bits in (16, 32) else 4 if self.num_bits == 64 else 1

    @property
    def storage(self) -> np.dtype:
        """NumPy dtype of arrays; its metadata name the type if NumPy lacks it."""
        if self.name in _NAMED_BY_METADATA:
            return np.dtype(self.numpy_name, metadata={_NAME: self.name})
        return np.dtype(self.numpy_name)


ELEMENT_TYPES = {
    row[0]: ElementType(*row)
    for row in (
        (BYTES, 8, _BYTE, Dtype.INT8),
        ("BOOL", 8, "|b1", Dtype.INT8),
        ("F4", 4, _BYTE, Dtype.INT8),
        ("F6_E2M3", 6, _BYTE, Dtype.INT8),
        ("F6_E3M2", 6, _BYTE, Dtype.INT8),
        ("U8", 8, _BYTE, Dtype.INT8),
        ("I8", 8, "|i1", Dtype.INT8),
        ("F8_E4M3", 8, _BYTE, Dtype.FP8_E4M3),
        ("F8_E4M3FNUZ", 8, _BYTE, Dtype.FP8_E4M3),
        ("F8_E5M2", 8, _BYTE, Dtype.INT8),
        ("F8_E5M2FNUZ", 8, _BYTE, Dtype.INT8),
        ("F8_E8M0", 8, _BYTE, Dtype.INT8),
        ("I16", 16, "<i2", Dtype.INT16),
        ("U16", 16, "<u2", Dtype.INT16),
        ("F16", 16, "<f2", Dtype.FP16),
        ("BF16", 16, "<u2", Dtype.BF16),
        ("I32", 32, "<i4", Dtype.INT32),
        ("U32", 32, "<u4", Dtype.INT32),
        ("F32", 32, "<f4", Dtype.FP32),
        ("I64", 64, "<i8", Dtype.INT32),
        ("U64", 64, "<u8", Dtype.INT32),
        ("F64", 64, "<f8", Dtype.INT32),
        ("C64", 64, "<c8", Dtype.INT32),
    )
}
_NAMED_BY_METADATA = ("F8_E4M3", "F8_E8M0")
# NumPy type string -> element type; uint16 means bfloat16, which NumPy lacks.
_BY_NUMPY = {
    ELEMENT_TYPES[name].numpy_name: name
    for name in ("BOOL", "U8", "I8", "I16", "F16", "BF16", "I32", "U32", "F32")
}


def element_type_of(array: np.ndarray) -> str:
    """Return the name of an array's element type.

    Raises:
        ValueError: The delta codec has no type for the array's dtype.

    """
    metadata: dict[str, str] = dict(array.dtype.metadata or {})
    name = metadata.get(_NAME) or _BY_NUMPY.get(array.dtype.str)
    if name is None:
        known = ", ".join([*_BY_NUMPY, *_NAMED_BY_METADATA])
        raise ValueError(f"dtype: expected one with a delta codec ({known}), got {array.dtype}")
    return name


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Row of a tensor table."""

    name: str
    dtype: str
    """Element type, a key of `ELEMENT_TYPES`."""
    shape: tuple[int, ...]

    @property
    def element_type(self) -> ElementType:
        """Row of `ELEMENT_TYPES` for the tensor's elements.

        Raises:
            ValueError: The type is unknown.

        """
        if (found := ELEMENT_TYPES.get(self.dtype)) is None:
            raise ValueError(
                f"dtype: expected one of {', '.join(ELEMENT_TYPES)}, got {self.dtype!r}"
            )
        return found

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in memory, in bytes.

        Raises:
            ValueError: The type is unknown, the shape has more than 64 dimensions or a negative
                one, or packed elements do not fill whole bytes.

        """
        shape = self.shape
        if len(shape) > _DIMENSIONS_MAX:
            raise ValueError(f"shape: expected at most {_DIMENSIONS_MAX} sizes, got {len(shape)}")
        if any(size < 0 for size in shape):
            raise ValueError(f"shape: expected sizes >= 0, got {list(shape)}")
        # In bits, as several elements of fewer than 8 bits share a byte.
        num_bits = self.size * self.element_type.num_bits
        if num_bits % 8:
            raise ValueError(f"shape: {list(shape)} of {self.dtype} does not fill whole bytes")
        return num_bits // 8
