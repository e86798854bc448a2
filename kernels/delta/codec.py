"""The ladder of codecs: each payload takes the smallest that fits.

```
 nothing changed ──▶ equal
 2-byte elements ──▶ class_gap_ulp    others ──▶ gap_ulp     and raw, where it is smaller still
```
"""

import msgspec
import numpy as np
import xxhash

from penstock.kernels.delta.container import pack, read_header, unpack
from penstock.kernels.delta.gap_ulp import decode_gap_ulp, encode_gap_ulp
from penstock.kernels.delta.header import NUM_ELEMENTS_MAX, Codec, Header
from penstock.messages.errors import CorruptDataError

_RAW_FROM_SHARE = 1 / 4
"""Raw is tried where the gaps take this share of the array; below, it seldom wins."""
_CLASSED_ITEMSIZE = 2
"""Element size that has exponents to go by: that of bfloat16."""
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Patch(msgspec.Struct, frozen=True):
    """Absolute overwrites of a flat array: writing them twice does no harm."""

    flat_indices: np.ndarray
    """[K] int64, each once, in no order."""
    values: np.ndarray
    """[K] bit patterns."""


def encode(base: np.ndarray, target: np.ndarray) -> bytes:
    """Encode what turns `base` into `target`.

    Args:
        base: [N] uint8, uint16 (bfloat16 bit patterns) or uint32.
        target: the same shape and dtype.

    Returns:
        The smallest payload of the ladder.

    Raises:
        ValueError: not two flat arrays of one length and one of the dtypes.

    """
    changed = _changed_positions(base, target)
    if changed.size == 0:
        return encode_with(Codec.EQUAL, base, target, changed)
    codec = Codec.CLASS_GAP_ULP if base.itemsize == _CLASSED_ITEMSIZE else Codec.GAP_ULP
    payload = encode_with(codec, base, target, changed)
    if len(payload) < _RAW_FROM_SHARE * base.nbytes:
        return payload
    return min(payload, encode_with(Codec.RAW, base, target, changed), key=len)


def encode_with(
    codec: Codec, base: np.ndarray, target: np.ndarray, changed: np.ndarray | None = None
) -> bytes:
    """Encode with one codec; `changed` gives the changed positions where they are known.

    Raises:
        ValueError: arrays that do not fit each other or the codec.

    """
    if changed is None:
        changed = _changed_positions(base, target)
    header = Header(
        codec=codec,
        itemsize=base.itemsize,
        num_elements=base.size,
        num_changed=changed.size,
        base_check=xxhash.xxh3_64_intdigest(base.data),
        target_check=xxhash.xxh3_64_intdigest(target.data),
    )
    match codec:
        case Codec.EQUAL:
            return pack(header, [])
        case Codec.RAW:
            planes = target.view(np.uint8).reshape(-1, target.itemsize)
            return pack(header, [plane.tobytes() for plane in planes.T])
        case Codec.GAP_ULP | Codec.CLASS_GAP_ULP:
            records, streams = encode_gap_ulp(codec, base, target, changed)
            return pack(msgspec.structs.replace(header, classes=records), streams)


def decode(base: np.ndarray, payload: bytes | memoryview) -> Patch:
    """Decode to overwrites of `base`; nothing is written.

    Raises:
        CorruptDataError: the payload is damaged or foreign, or was made against another base.

    """
    _check_base(read_header(payload), base)
    header, streams = unpack(payload)
    try:
        match header.codec:
            case Codec.EQUAL:
                return Patch(np.zeros(0, np.int64), base[:0])
            case Codec.RAW:
                return _decode_raw(base, streams)
            case Codec.GAP_ULP | Codec.CLASS_GAP_ULP:
                return Patch(*decode_gap_ulp(header, base, streams))
    except ValueError as error:
        raise CorruptDataError(f"delta: its streams contradict each other: {error}") from error


def apply(base: np.ndarray, payload: bytes | memoryview) -> np.ndarray:
    """Return the target, proved equal to the one encoded.

    Raises:
        CorruptDataError: as `decode`, or the result is not the encoded target.

    """
    patch = decode(base, payload)
    target = base.copy()
    target[patch.flat_indices] = patch.values
    if xxhash.xxh3_64_intdigest(target.data) != read_header(payload).target_check:
        raise CorruptDataError("delta: the result is not the array that was encoded")
    return target


def _changed_positions(base: np.ndarray, target: np.ndarray) -> np.ndarray:
    if base.ndim != 1 or base.shape != target.shape or base.dtype != target.dtype:
        raise ValueError(
            f"expected two flat arrays of one length and dtype, got {base.dtype}{base.shape}"
            f" and {target.dtype}{target.shape}"
        )
    if base.dtype not in _UNSIGNED.values() or base.size > NUM_ELEMENTS_MAX:
        raise ValueError(
            f"expected at most {NUM_ELEMENTS_MAX} elements of uint8, uint16 or uint32,"
            f" got {base.size} of {base.dtype}"
        )
    if not (base.flags.c_contiguous and target.flags.c_contiguous):
        raise ValueError("expected contiguous arrays, got strided ones")
    return np.flatnonzero(base != target)


def _check_base(header: Header, base: np.ndarray) -> None:
    if base.shape != (header.num_elements,) or base.dtype != _UNSIGNED[header.itemsize]:
        raise CorruptDataError(
            f"delta: made for {header.num_elements} elements of {header.itemsize} bytes,"
            f" the base is {base.dtype}{base.shape}"
        )
    if header.codec is not Codec.RAW and xxhash.xxh3_64_intdigest(base.data) != header.base_check:
        raise CorruptDataError("delta.base_check: the payload was made against another base")


def _decode_raw(base: np.ndarray, streams: list[bytes]) -> Patch:
    if any(len(stream) != base.size for stream in streams):
        raise CorruptDataError("delta.raw: a plane is not as long as the array")
    planes = np.stack([np.frombuffer(stream, np.uint8) for stream in streams], axis=1)
    target = np.ascontiguousarray(planes).view(base.dtype).reshape(-1)
    indices = np.flatnonzero(base != target)
    return Patch(indices, target[indices])
