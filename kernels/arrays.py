"""Arrays between numpy and the wire."""

import math

import numpy as np

from penstock.messages.base import Array

_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", "float32", "float64")


def to_array(values: np.ndarray) -> Array:
    """Pack an array of any shape, C-ordered and little-endian.

    Raises:
        ValueError: A dtype that does not travel; the text lists those that do.

    """
    name = values.dtype.name
    little = np.ascontiguousarray(values, dtype=_wire_dtype(name))
    return Array(dtype=name, shape=values.shape, data=little.tobytes())


def from_array(array: Array) -> np.ndarray:
    """View the bytes of a message as a read-only array, without copying.

    Raises:
        ValueError: An unknown dtype, a negative dimension, or bytes that do not fill the shape.

    """
    dtype = _wire_dtype(array.dtype)
    if any(size < 0 for size in array.shape):
        raise ValueError(f"Array.shape: expected sizes >= 0, got {array.shape}")
    expected = math.prod(array.shape) * dtype.itemsize
    if len(array.data) != expected:
        raise ValueError(
            f"Array.data: {array.dtype}{list(array.shape)} takes {expected} bytes, "
            f"got {len(array.data)}"
        )
    return np.frombuffer(array.data, dtype).reshape(array.shape)


def _wire_dtype(name: str) -> np.dtype:
    if name not in _DTYPES:
        raise ValueError(f"Array.dtype: expected one of {', '.join(_DTYPES)}, got {name!r}")
    return np.dtype(name).newbyteorder("<")
