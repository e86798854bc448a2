"""Conversion between NumPy arrays and the arrays of messages."""

import numpy as np

from penstock.messages.base import Array


def to_array(values: np.ndarray) -> Array:
    """Pack a NumPy array of any shape for a message.

    Raises:
        ValueError: The dtype is not supported; the text lists those that are.

    """
    name = values.dtype.name
    little = np.ascontiguousarray(values, dtype=_wire_dtype(name))
    return Array(dtype=name, shape=values.shape, data=little.tobytes())


def from_array(array: Array) -> np.ndarray:
    """View the bytes of a message as a read-only NumPy array, without copying."""
    # `Array` has already checked that the bytes fill the shape.
    return np.frombuffer(array.data, _wire_dtype(array.dtype)).reshape(array.shape)


def _wire_dtype(name: str) -> np.dtype:
    return np.dtype(name).newbyteorder("<")
