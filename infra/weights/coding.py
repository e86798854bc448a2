"""Encodes the words of an extent by their element type, or as packed four-bit integers.

The element type does not show that an I32 holds eight four-bit weights, or a U8 two, as in GPTQ,
AWQ and compressed-tensors; the changes do, because a changed weight only affects its own half
byte. Coding by half bytes then halves the size for I32 and saves a tenth for U8.
"""

import numpy as np

from penstock.kernels import delta
from penstock.kernels.delta import Dtype

_MAY_BE_PACKED = {Dtype.INT8, Dtype.INT32}
_PACKED_SHARE_MIN = 0.25
"""Minimum share of changed words in which only one half byte changed, and not the lowest. It is a
half or seven eighths for packed words of 2 or 8 half bytes, and about zero for whole integers,
whose steps are small."""


def encode_words(base: np.ndarray, target: np.ndarray, kind: Dtype) -> bytes:
    """Encode words [N] against their base [N], by their element type."""
    if kind in _MAY_BE_PACKED and _is_packed(base, target):
        return delta.encode(_as_bytes(base), _as_bytes(target), Dtype.INT4X2)
    return delta.encode(base, target, kind)


def apply_words(base: np.ndarray, payload: bytes, out: np.ndarray | None = None) -> np.ndarray:
    """Return the target words [N] of a payload.

    Raises:
        CorruptDataError: The payload is damaged or has another base.

    """
    if delta.read_header(payload).dtype is Dtype.INT4X2:
        halves_out = None if out is None else out.view(np.uint8)
        return delta.apply(_as_bytes(base), payload, halves_out).view(base.dtype)
    return delta.apply(base, payload, out)


def num_bytes_coded(header: delta.Header) -> int:
    """Return the size in bytes of the words of a payload."""
    return header.num_items * header.dtype.storage.itemsize


def _is_packed(base: np.ndarray, target: np.ndarray) -> bool:
    moved = (base ^ target)[base != target].astype(np.uint64)
    if not moved.size:
        return False
    # The lowest set bit; with the highest one it gives the first and the last changed half byte.
    lowest = moved & (~moved + np.uint64(1))
    first, last = (
        np.log2(bits.astype(np.float64)).astype(np.int64) // 4 for bits in (lowest, moved)
    )
    num_alone = int(np.count_nonzero((first == last) & (first > 0)))
    return num_alone >= _PACKED_SHARE_MIN * moved.size


def _as_bytes(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words).view(np.uint8)
