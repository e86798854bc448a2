"""Digests that prove two sets of tensors equal, bit for bit.

A tensor's digest covers its dtype, shape and bytes; a root digest adds up the digests of named
tensors, so that it depends neither on the order of the names nor on who holds which tensor:
shards can be digested apart and summed.
"""

import numpy as np
import xxhash

_MODULUS = 1 << 128


def tensor_digest(array: np.ndarray) -> int:
    """Digest one tensor.

    Args:
        array: any shape and dtype; bfloat16 travels as its uint16 bit pattern.

    Returns:
        The 128-bit xxh3 of dtype, shape and bytes in C order.

    """
    hasher = xxhash.xxh3_128(f"{array.dtype.str}{array.shape}".encode())
    hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return hasher.intdigest()


def named_digest(name: str, digest: int) -> int:
    """Bind a tensor's digest to its name: one summand of the root digest."""
    return xxhash.xxh3_128(name.encode() + b"\0" + digest.to_bytes(16, "big")).intdigest()


def root_digest(arrays: dict[str, np.ndarray]) -> str:
    """Digest named tensors, independent of their order in the dict.

    Returns:
        32 hexadecimal digits: the sum of the named digests modulo 2**128.

    """
    total = sum(named_digest(name, tensor_digest(array)) for name, array in arrays.items())
    return f"{total % _MODULUS:032x}"
