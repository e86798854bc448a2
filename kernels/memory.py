"""Arrays in huge pages: large tables that are read at random stall less on address look-ups."""

import math
import mmap

import numpy as np


def huge_zeros(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Return zeros of a shape, in huge pages where the system gives them."""
    dtype = np.dtype(dtype)
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=dtype, count=math.prod(shape)).reshape(shape)
