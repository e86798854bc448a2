"""Digests that prove two sets of tensors equal, bit for bit.

A tensor's digest covers its dtype, shape and bytes; a root digest adds up the digests of named
tensors, so that it depends neither on the order of the names nor on who holds which tensor:
shards can be digested apart and summed. An element sum does the same element by element: it adds
up over any cut, and follows an update in the number of changed elements.
"""

import ctypes
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import xxhash

from penstock.kernels.native import load_library

_MODULUS = 1 << 128
_CHUNK_ELEMENTS = 1 << 20
_PLACE, _VALUE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class TensorHasher:
    """Digests one tensor, whose bytes are fed in C order."""

    def __init__(self, numpy_name: str, shape: tuple[int, ...]) -> None:
        self._hash = xxhash.xxh3_128(f"{numpy_name}{shape}".encode())

    def update(self, words: np.ndarray) -> None:
        """Add the next words [N], contiguous."""
        self._hash.update(words.data)

    def digest(self) -> bytes:
        """Return the 16 bytes of the xxh3-128 of dtype, shape and bytes."""
        return self._hash.digest()


def tensor_digest(array: np.ndarray) -> int:
    """Digest one tensor.

    Args:
        array: any shape and dtype; bfloat16 travels as its uint16 bit pattern.

    Returns:
        The 128-bit xxh3 of dtype, shape and bytes in C order.

    """
    hasher = TensorHasher(array.dtype.str, array.shape)
    hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return int.from_bytes(hasher.digest(), "big")


def named_digest(name: str, digest: int) -> int:
    """Bind a tensor's digest to its name: one summand of the root digest."""
    return xxhash.xxh3_128(name.encode() + b"\0" + digest.to_bytes(16, "big")).intdigest()


def root_digest(arrays: dict[str, np.ndarray]) -> str:
    """Digest named tensors, independent of their order in the dict.

    Returns:
        32 hexadecimal digits: the sum of the named digests modulo 2**128.

    """
    return root_of(named_digest(name, tensor_digest(array)) for name, array in arrays.items())


def root_of(named: Iterable[int]) -> str:
    """Return the root digest of named digests, or of sums of some of them; see `root_digest`."""
    return f"{sum(named) % _MODULUS:032x}"


def element_sum(places: np.ndarray, values: np.ndarray) -> int:
    """Add up a mix of place and value over elements, modulo 2**64.

    The sum over a whole snapshot is the sum over any cut of it, and an update changes it by the new
    elements' sum less the old ones': holders of different shards compare without gathering.
    It guards against accidents, not against forgers.

    Args:
        places: [K] flat coordinates in the whole snapshot.
        values: [K] bit patterns, unsigned.

    """
    mixed = places.astype(np.uint64) * _PLACE + _MIX[0]
    mixed ^= (mixed >> np.uint64(31)) + (values.astype(np.uint64) + np.uint64(1)) * _VALUE
    for shift, factor in zip((30, 27), _MIX, strict=True):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= factor
    mixed ^= mixed >> np.uint64(31)
    return int(mixed.sum(dtype=np.uint64))


def run_element_sum(start: int, values: np.ndarray) -> int:
    """Add up the elements of a run that begins at a flat coordinate, in bounded memory.

    Args:
        start: of the first element, in the whole snapshot.
        values: bit patterns, unsigned and contiguous, of any shape.

    """
    flat = values.reshape(-1)
    library = _sum_library()
    if library is not None:
        sizes = (ctypes.c_int64(flat.size), ctypes.c_int64(flat.itemsize))
        return library.penstock_run_sum(
            ctypes.c_int64(start), ctypes.c_void_p(flat.ctypes.data), *sizes
        )
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
