"""The ladder of codecs: each payload takes the smallest that fits.

```
 nothing changed ──▶ equal
 else the smallest of  class_gap_ulp (2-byte elements)  gap_ulp  and, from 1/8 changed, raw
```
"""

import msgspec
import numpy as np
import xxhash

from penstock.kernels.delta import classes, gaps, ulp
from penstock.kernels.delta.container import (
    NUM_CLASSES_MAX,
    NUM_ELEMENTS_MAX,
    STREAMS_PER_CLASS,
    ClassRecord,
    Codec,
    Header,
    pack,
    read_header,
    unpack,
)
from penstock.messages.errors import CorruptDataError

_RAW_FROM_CHANGED = 1 / 8
"""Raw is tried from this changed fraction on; below, it cannot win."""
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
Members = list[np.ndarray]
"""By class, the positions [n_c] of its elements in the array, rising."""


class Patch(msgspec.Struct, frozen=True):
    """Absolute overwrites of a flat array: writing them twice does no harm."""

    flat_indices: np.ndarray
    """[K] int64, rising."""
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
    candidates = [Codec.GAP_ULP]
    if base.itemsize == 2:
        candidates.append(Codec.CLASS_GAP_ULP)
    if changed.size >= _RAW_FROM_CHANGED * base.size:
        candidates.append(Codec.RAW)
    return min((encode_with(codec, base, target, changed) for codec in candidates), key=len)


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
            return _encode_gap_ulp(header, base, target, changed)


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
                return _decode_gap_ulp(header, base, streams)
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
    return np.flatnonzero(base != target)


def _check_base(header: Header, base: np.ndarray) -> None:
    if base.shape != (header.num_elements,) or base.dtype != _UNSIGNED[header.itemsize]:
        raise CorruptDataError(
            f"delta: made for {header.num_elements} elements of {header.itemsize} bytes,"
            f" the base is {base.dtype}{base.shape}"
        )
    if header.codec is not Codec.RAW and xxhash.xxh3_64_intdigest(base.data) != header.base_check:
        raise CorruptDataError("delta.base_check: the payload was made against another base")


def _encode_gap_ulp(
    header: Header, base: np.ndarray, target: np.ndarray, changed: np.ndarray
) -> bytes:
    is_changed = np.zeros(base.size, np.bool_)
    is_changed[changed] = True
    if header.codec is Codec.CLASS_GAP_ULP:
        keys = classes.exponent_keys(base)
        thresholds = classes.choose_thresholds(keys, keys[changed], NUM_CLASSES_MAX)
    else:
        thresholds = [0]
    records: list[ClassRecord] = []
    streams: list[bytes] = []
    for key, members in zip(thresholds, _members(base, thresholds), strict=True):
        record, class_streams = _encode_class(key, members, is_changed[members], base, target)
        records.append(record)
        streams += class_streams
    return pack(msgspec.structs.replace(header, classes=tuple(records)), streams)


def _members(base: np.ndarray, thresholds: list[int]) -> Members:
    if len(thresholds) == 1:
        return [np.arange(base.size)]
    labels = classes.labels_of(classes.exponent_keys(base), thresholds)
    return [np.flatnonzero(labels == label) for label in range(len(thresholds))]


def _encode_class(
    key: int, members: np.ndarray, hits: np.ndarray, base: np.ndarray, target: np.ndarray
) -> tuple[ClassRecord, list[bytes]]:
    moved = members[hits]
    inverted = 2 * moved.size > members.size
    positions = np.flatnonzero(~hits if inverted else hits)
    shift = gaps.choose_shift(members.size, positions.size)
    record = ClassRecord(
        first_key=key,
        shift=shift,
        inverted=inverted,
        num_coded=positions.size,
        num_changed=moved.size,
    )
    steps = ulp.encode_steps(base[moved], target[moved])
    return record, [*gaps.encode_gaps(positions, shift), *steps]


def _decode_gap_ulp(header: Header, base: np.ndarray, streams: list[bytes]) -> Patch:
    members = _members(base, [record.first_key for record in header.classes])
    moved: list[np.ndarray] = []
    values: list[np.ndarray] = []
    for number, (record, own) in enumerate(zip(header.classes, members, strict=True)):
        first = number * STREAMS_PER_CLASS
        where = own[_class_hits(record, own.size, streams[first : first + 3])]
        codes, escapes = streams[first + 3 : first + STREAMS_PER_CLASS]
        moved.append(where)
        values.append(
            ulp.decode_steps(
                base[where], np.frombuffer(codes, np.uint8), np.frombuffer(escapes, base.dtype)
            )
        )
    indices = np.concatenate(moved)
    order = np.argsort(indices)
    return Patch(indices[order], np.concatenate(values)[order])


def _class_hits(record: ClassRecord, population: int, streams: list[bytes]) -> np.ndarray:
    """Return the positions [k_c], within the class, of its changed elements."""
    codes = np.frombuffer(streams[0], np.uint8)
    if codes.size != record.num_coded:
        raise CorruptDataError(f"delta.classes: {codes.size} gaps for {record.num_coded} positions")
    low, escapes = np.frombuffer(streams[1], np.uint8), np.frombuffer(streams[2], "<u4")
    positions = gaps.decode_gaps(codes, low, escapes, record.shift)
    if positions.size and (positions.min() < 0 or positions.max() >= population):
        raise CorruptDataError("delta.gaps: a position lies outside of its class")
    if record.inverted:
        kept = np.ones(population, np.bool_)
        kept[positions] = False
        positions = np.flatnonzero(kept)
    if positions.size != record.num_changed:
        raise CorruptDataError("delta.classes: the positions are not as many as the changes")
    return positions


def _decode_raw(base: np.ndarray, streams: list[bytes]) -> Patch:
    if any(len(stream) != base.size for stream in streams):
        raise CorruptDataError("delta.raw: a plane is not as long as the array")
    planes = np.stack([np.frombuffer(stream, np.uint8) for stream in streams], axis=1)
    target = np.ascontiguousarray(planes).view(base.dtype).reshape(-1)
    indices = np.flatnonzero(base != target)
    return Patch(indices, target[indices])
