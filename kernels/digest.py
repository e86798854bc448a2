"""Digests for checking that two sets of tensors are equal, bit for bit.

A tensor digest covers dtype, shape and bytes. A root digest is the sum of the digests of named
tensors: it depends neither on the order of names nor on which process holds which tensor, so shards
can be digested separately and added up. An element sum does the same at element level: it adds up
however a snapshot is cut, and can be updated in time proportional to the number of changed
elements.
"""

import ctypes
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import xxhash

from penstock.kernels.native import load_library

_MODULUS = 1 << 128
# Elements summed at once in NumPy, which bounds the memory of temporary arrays.
_CHUNK_ELEMENTS = 1 << 20
_PLACE, _VALUE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class TensorHasher:
    """Incremental digest of one tensor, whose bytes are added in C order."""

    def __init__(self, numpy_name: str, shape: tuple[int, ...]) -> None:
        self._hash = xxhash.xxh3_128(f"{numpy_name}{shape}".encode())

    def update(self, words: np.ndarray) -> None:
        """Add the next contiguous words [N]."""
        self._hash.update(words.data)

    def digest(self) -> bytes:
        """Return the xxh3-128 of dtype, shape and bytes as 16 bytes."""
        return self._hash.digest()


def tensor_digest(array: np.ndarray) -> int:
    """Digest one tensor.

    Args:
        array: Array of any shape and dtype; bfloat16 as its uint16 bit patterns.

    Returns:
        xxh3-128 of dtype, shape and bytes in C order.

    """
    hasher = TensorHasher(array.dtype.str, array.shape)
    hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return int.from_bytes(hasher.digest(), "big")


def named_digest(name: str, digest: int) -> int:
    """Combine a tensor's digest with its name, which gives one term of the root digest."""
    return xxhash.xxh3_128(name.encode() + b"\0" + digest.to_bytes(16, "big")).intdigest()


def root_digest(arrays: dict[str, np.ndarray]) -> str:
    """Return the root digest of named tensors, independent of their order in the dict.

    Returns:
        Sum of the named digests modulo 2**128, as 32 hexadecimal digits.

    """
    return root_of(named_digest(name, tensor_digest(array)) for name, array in arrays.items())


def root_of(named: Iterable[int]) -> str:
    """Return the root digest, given named digests or partial sums of them; see `root_digest`."""
    return f"{sum(named) % _MODULUS:032x}"


def element_sum(places: np.ndarray, values: np.ndarray) -> int:
    """Return the sum modulo 2**64 of a hash of position and value over elements.

    The sums of the parts of a snapshot add up to the sum of the whole however it is cut, and an
    update changes it by the sum of the new elements minus that of the old ones. Holders of shards
    can therefore compare snapshots without gathering them. It detects corruption, not forgery.

    Args:
        places: Flat coordinates [K] in the full snapshot.
        values: Unsigned bit patterns [K].

    """
    # Ends with the finalizer of splitmix64, as plain sums of places and values would collide
    # easily. `digest.c` has the same steps.
    mixed = places.astype(np.uint64) * _PLACE + _MIX[0]
    mixed ^= (mixed >> np.uint64(31)) + (values.astype(np.uint64) + np.uint64(1)) * _VALUE
    for shift, factor in zip((30, 27), _MIX, strict=True):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= factor
    mixed ^= mixed >> np.uint64(31)
    return int(mixed.sum(dtype=np.uint64))


def run_element_sum(start: int, values: np.ndarray) -> int:
    """Return the element sum of a contiguous range of a snapshot, in bounded memory.

    Args:
        start: Flat coordinate of the first element in the full snapshot.
        values: Unsigned bit patterns, contiguous, of any shape.

    """
    flat = values.reshape(-1)
    library = _sum_library()
    if library is not None:
        sizes = (ctypes.c_int64(flat.size), ctypes.c_int64(flat.itemsize))
        return library.penstock_run_sum(
            ctypes.c_int64(start), ctypes.c_void_p(flat.ctypes.data), *sizes
        )
    # Without a compiler: chunks bound the memory for positions and hashes.
    total = 0
    for at in range(0, flat.size, _CHUNK_ELEMENTS):
        part = flat[at : at + _CHUNK_ELEMENTS]
        total += element_sum(np.arange(start + at, start + at + part.size), part)
    return total % (1 << 64)


@cache
def _sum_library() -> ctypes.CDLL | None:
    library = load_library(Path(__file__).with_name("digest.c"))
    if library is not None:
        library.penstock_run_sum.restype = ctypes.c_uint64
    return library
