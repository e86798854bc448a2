"""Arrays between numpy and the wire."""

import numpy as np

from penstock.messages.base import Array


def to_array(values: np.ndarray) -> Array:
    """Pack an array of any shape, C-ordered and little-endian.

    Raises:
        ValueError: A dtype that does not travel; the text lists those that do.

    """
    name = values.dtype.name
    little = np.ascontiguousarray(values, dtype=_wire_dtype(name))
    return Array(dtype=name, shape=values.shape, data=little.tobytes())


def from_array(array: Array) -> np.ndarray:
    """View the bytes of a message as a read-only array, without copying; `Array` checked them."""
    return np.frombuffer(array.data, _wire_dtype(array.dtype)).reshape(array.shape)


def _wire_dtype(name: str) -> np.dtype:
    return np.dtype(name).newbyteorder("<")
