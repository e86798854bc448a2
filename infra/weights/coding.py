"""The coding of an extent's words: by their element type, or as packed four-bit integers.

No element type shows that an I32 holds eight weights of four bits, or a U8 two (as GPTQ, AWQ,
compressed-tensors and others store them); the changes do. A changed weight moves bits of its
own half byte and of no other. Coded half byte by half byte, such a change is a small step wherever
in the word it is: half the size for I32, a tenth less for U8.
"""

import numpy as np

from penstock.kernels import delta
from penstock.kernels.delta import Dtype

_MAY_BE_PACKED = {Dtype.INT8, Dtype.INT32}
_PACKED_SHARE_MIN = 0.25
"""Share of the changed words in which one half byte changed, and not the lowest: in packed words
of 2 or 8 half bytes a half and seven eighths; in whole integers, which take small steps, none."""


def encode_words(base: np.ndarray, target: np.ndarray, kind: Dtype) -> bytes:
    """Encode words [N] against their base [N], by their element type."""
    if kind in _MAY_BE_PACKED and _is_packed(base, target):
        return delta.encode(_as_bytes(base), _as_bytes(target), Dtype.INT4X2)
    return delta.encode(base, target, kind)


def apply_words(base: np.ndarray, payload: bytes, out: np.ndarray | None = None) -> np.ndarray:
    """Return the words [N] that a payload of `encode_words` leads to.

    Args:
        base: words [N].
        payload: of `encode_words`.
        out: as of `delta.apply`, words [N].

    Raises:
        CorruptDataError: it is damaged, or was made against another base.

    """
    if delta.read_header(payload).dtype is Dtype.INT4X2:
        halves_out = None if out is None else out.view(np.uint8)
        return delta.apply(_as_bytes(base), payload, halves_out).view(base.dtype)
    return delta.apply(base, payload, out)


def num_bytes_coded(header: delta.Header) -> int:
    """Return the bytes of the words that a payload codes."""
    return header.num_items * header.dtype.storage.itemsize


def _is_packed(base: np.ndarray, target: np.ndarray) -> bool:
    moved = (base ^ target)[base != target].astype(np.uint64)
    if not moved.size:
        return False
    lowest = moved & (~moved + np.uint64(1))
    first, last = (
        np.log2(bits.astype(np.float64)).astype(np.int64) // 4 for bits in (lowest, moved)
    )
    num_alone = int(np.count_nonzero((first == last) & (first > 0)))
    return num_alone >= _PACKED_SHARE_MIN * moved.size


def _as_bytes(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words).view(np.uint8)
