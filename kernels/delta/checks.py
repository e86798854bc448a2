"""Checks of whole arrays, taken along the way while they are worked on.

An array is read from memory once: each chunk is hashed while the coding has it in the caches.
"""

from collections.abc import Iterator

import numpy as np
import xxhash

_CHUNK_BYTES = 1 << 18
"""Of each of two arrays, in the second cache; a whole number of tiles of any element size."""


def check_of(array: np.ndarray) -> int:
    """Return the xxh3-64 of a contiguous array's bytes."""
    return xxhash.xxh3_64_intdigest(array.reshape(-1).data)


def chunks_of(array: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield where the chunks of an array [N] begin and end; of an empty one, one empty chunk."""
    step = _CHUNK_BYTES // array.itemsize
    for start in range(0, max(1, array.size), step):
        yield start, min(start + step, array.size)
