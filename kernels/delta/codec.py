"""The ladder of codecs: each payload takes the smallest that fits.

```
 nothing changed ──▶ equal
 2-byte elements ──▶ class_gap_ulp    others ──▶ gap_ulp     and raw, where it is smaller still
```
"""

from collections.abc import Iterator

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
    thresholds, populations, groups = [0], [base.size], [(changed, changed)]
    if header.codec is Codec.CLASS_GAP_ULP:
        keys = classes.exponent_keys(base)
        counts = classes.key_counts(keys)
        hits = np.bincount(keys[changed], minlength=classes.NUM_KEYS)
        thresholds = classes.choose_thresholds(counts.sum(axis=0), hits, NUM_CLASSES_MAX)
        grouping = classes.Grouping(keys, counts, thresholds)
        populations, groups = grouping.populations, grouping.ranks(base != target)
    records: list[ClassRecord] = []
    streams: list[bytes] = []
    for key, population, (ranks, places) in zip(thresholds, populations, groups, strict=True):
        marks, mark_streams = gaps.encode_marks(ranks, population)
        large, step_streams = _encode_steps(base[places], target[places])
        records.append(
            ClassRecord(first_key=key, num_changed=ranks.size, changed=marks, large=large)
        )
        streams += mark_streams + step_streams
    return pack(msgspec.structs.replace(header, classes=tuple(records)), streams)


def _encode_steps(base: np.ndarray, target: np.ndarray) -> tuple[gaps.MarksRecord, list[bytes]]:
    is_down, sizes = ulp.steps_between(base, target)
    large = np.flatnonzero(sizes >= ulp.SMALLEST_LARGE)
    record, marks = gaps.encode_marks(large, sizes.size)
    return record, [gaps.pack_bits(is_down), *marks, *ulp.encode_sizes(sizes[large])]


def _decode_gap_ulp(header: Header, base: np.ndarray, streams: list[bytes]) -> Patch:
    populations, grouping = [base.size], None
    if header.codec is Codec.CLASS_GAP_ULP:
        keys = classes.exponent_keys(base)
        thresholds = [record.first_key for record in header.classes]
        grouping = classes.Grouping(keys, classes.key_counts(keys), thresholds)
        populations = grouping.populations
    by_class = list(_streams_by_class(streams))
    ranks = [
        _decode_ranks(record, own, population)
        for record, own, population in zip(header.classes, by_class, populations, strict=True)
    ]
    places = ranks if grouping is None else grouping.places(ranks)
    values = [
        _decode_steps(record, own[gaps.STREAMS_PER_MARKS :], base[where])
        for record, own, where in zip(header.classes, by_class, places, strict=True)
    ]
    return Patch(np.concatenate(places), np.concatenate(values))


def _streams_by_class(streams: list[bytes]) -> Iterator[list[bytes]]:
    for first in range(0, len(streams), STREAMS_PER_CLASS):
        yield streams[first : first + STREAMS_PER_CLASS]


def _decode_ranks(record: ClassRecord, own: list[bytes], population: int) -> np.ndarray:
    ranks = gaps.decode_marks(record.changed, own[: gaps.STREAMS_PER_MARKS], population)
    if ranks.size != record.num_changed:
        raise ValueError(f"{ranks.size} ranks for {record.num_changed} changes")
    return ranks


def _decode_steps(record: ClassRecord, own: list[bytes], base: np.ndarray) -> np.ndarray:
    """Return the new values [k_c] of the class's changed elements."""
    signs, *marks, codes, escapes = own
    is_down = gaps.unpack_bits(np.frombuffer(signs, np.uint8), base.size)
    large = gaps.decode_marks(record.large, marks, base.size)
    sizes = np.ones(base.size, base.dtype)
    sizes[large] = ulp.decode_sizes(
        np.frombuffer(codes, np.uint8), np.frombuffer(escapes, base.dtype)
    )
    return ulp.walk(base, is_down, sizes)


def _decode_raw(base: np.ndarray, streams: list[bytes]) -> Patch:
    if any(len(stream) != base.size for stream in streams):
        raise CorruptDataError("delta.raw: a plane is not as long as the array")
    planes = np.stack([np.frombuffer(stream, np.uint8) for stream in streams], axis=1)
    target = np.ascontiguousarray(planes).view(base.dtype).reshape(-1)
    indices = np.flatnonzero(base != target)
    return Patch(indices, target[indices])
