"""Coding of marks and steps by compiled code (`c/delta.c`), or by `portable.py` without a compiler.

Calls release the interpreter lock, so that threads can code several arrays in parallel.
"""

import ctypes
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from penstock.kernels.delta import portable
from penstock.kernels.delta.arrays import check_of
from penstock.kernels.delta.dtypes import Dtype
from penstock.kernels.delta.header import NUM_CLASSES_MAX, ClassRecord, Codec, Header, MarksRecord
from penstock.kernels.native import load_library

_SOURCE = Path(__file__).parent / "c" / "delta.c"
# Space that the writer of a bit string needs beyond the bytes that it fills.
_SLACK_BYTES = 2048
_GROUP_ELEMENTS = 1024
# Maximum bytes of a number in either string: 33 bits, and its share of the block's parameter.
_NUMBER_BYTES_MAX = 5
# Size of the chunks of each array, which are hashed while they are in the L2 cache. It is a whole
# number of tiles for every element size. 128 KiB were slower, 512 KiB no better.
_CHUNK_BYTES = 1 << 18
# Maximum size of a buffer that a thread keeps from call to call.
_BUFFER_BYTES_MAX = 64 << 20


class Shape(ctypes.Structure):
    """C structure `shape_t`: two arrays of elements, and their classes."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("num_elements", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("itemsize", "bits", "is_float", "key_shift")),
        ("key_bits", ctypes.c_uint32),
        ("num_classes", ctypes.c_int32),
        ("has_mask", ctypes.c_int32),
        ("first_keys", ctypes.c_int32 * NUM_CLASSES_MAX),
    ]


class Record(ctypes.Structure):
    """C structure `record_t`: coding of one class, as in `ClassRecord`."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("num_changed", "num_coded", "inverted", "num_large_coded", "large_inverted")
    ]


class Streams(ctypes.Structure):
    """C structure `streams_t`: parts of a body."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("mask", "signs", "unary", "low")),
        ("unary_bytes", ctypes.c_int64),
        ("low_bytes", ctypes.c_int64),
    ]


Series = ctypes.c_int64 * 128
"""Memory for the C structure `series_t`: all series of a body, and positions in them."""


class Walk(NamedTuple):
    """Body whose series have been read, ready for computing the target."""

    shape: Shape
    series: ctypes.Array[ctypes.c_int64]
    numbers: np.ndarray
    """Memory that the series point into."""


def shape_of(
    dtype: Dtype,
    thresholds: list[int],
    base: np.ndarray,
    target: np.ndarray,
    *,
    has_mask: bool = False,
) -> Shape:
    """Return the C description of two arrays [N] and of the classes of the base."""
    traits = dtype.traits
    return Shape(
        address(base),
        address(target),
        base.size,
        *(traits.itemsize, traits.bits, traits.is_float, traits.key_shift, traits.num_keys - 1),
        len(thresholds),
        has_mask,
        (ctypes.c_int32 * NUM_CLASSES_MAX)(*thresholds),
    )


def class_record_of(first_key: int, record: Record) -> ClassRecord:
    """Convert the C record of an encoded class."""
    return ClassRecord(
        first_key=first_key,
        num_changed=record.num_changed,
        changed=MarksRecord(record.num_coded, bool(record.inverted)),
        large=MarksRecord(record.num_large_coded, bool(record.large_inverted)),
    )


def record_of(record: ClassRecord) -> Record:
    """Invert `class_record_of`, without the key."""
    return Record(
        record.num_changed,
        *(record.changed.num_coded, record.changed.inverted),
        *(record.large.num_coded, record.large.inverted),
    )


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    """Return the address of an array, as an argument of a C function."""
    return ctypes.c_void_p(array.ctypes.data)


def address(array: np.ndarray) -> int:
    """Return the address of an array, as a field of a C structure."""
    return array.ctypes.data


class _Buffers(threading.local):
    """Buffers of this thread, by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, np.ndarray] = {}


_buffers = _Buffers()


def thread_buffer(name: str, num_bytes: int) -> np.ndarray:
    """Return a buffer uint8 [num_bytes] of this thread, which overwrites its last one of that name.

    Buffers of more than 64 MiB are not kept.
    """
    # The first access to fresh memory took longer than coding (0.3 GB/s in a virtual machine), so
    # buffers are used again.
    found = _buffers.by_name.get(name)
    if found is None or found.size < num_bytes:
        found = np.empty(num_bytes, np.uint8)
        if num_bytes <= _BUFFER_BYTES_MAX:
            _buffers.by_name[name] = found
    return found[:num_bytes]


def chunks_of(array: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield start and end of each chunk of an array [N]; an empty array has one empty chunk."""
    step = _CHUNK_BYTES // array.itemsize
    for start in range(0, max(1, array.size), step):
        yield start, min(start + step, array.size)


def encode_steps(
    header: Header, thresholds: list[int], base: np.ndarray, target: np.ndarray
) -> tuple[Header, bytes | memoryview]:
    """Encode as `portable.encode_steps` does, with the same bytes.

    The body is a buffer that is valid until the next call by this thread.
    """
    library = load_delta_library()
    if library is None:
        return portable.encode_steps(header, thresholds, base, target)
    records = (Record * len(thresholds))()
    has_mask = header.codec is Codec.BITMASK_ULP
    shape = shape_of(header.dtype, thresholds, base, target, has_mask=has_mask)
    changed = thread_buffer("changed", -(-base.size // _GROUP_ELEMENTS) * _GROUP_ELEMENTS // 8)
    checks = _count(library, shape, records, (base, target), changed)
    num_changed = sum(record.num_changed for record in records)
    # Worst case: a rank, a step and a scratch number per changed element, and one more.
    num_numbers = 3 * num_changed + 1
    begin = portable.flag_bytes(header, num_changed)
    string_bytes = min(num_numbers * _NUMBER_BYTES_MAX, header.plain_bytes_max) + _SLACK_BYTES
    body, low = (
        thread_buffer("body", sum(begin) + 2 * string_bytes),
        thread_buffer("low", string_bytes),
    )
    mask, signs, unary = np.split(body, np.cumsum(begin))
    streams = Streams(*map(address, (mask, signs, unary, low)), string_bytes, string_bytes)
    numbers = thread_buffer("numbers", 4 * num_numbers)
    status = library.penstock_delta_encode(
        *map(ctypes.byref, (shape, records)),
        *map(pointer, (changed, numbers)),
        ctypes.byref(streams),
    )
    if status:
        raise MemoryError(f"no room to encode {base.size} elements")
    # The low bits were written to a buffer of their own; they follow the unary string.
    unary[streams.unary_bytes :][: streams.low_bytes] = low[: streams.low_bytes]
    plain_bytes = sum(begin) + streams.unary_bytes + streams.low_bytes
    return msgspec.structs.replace(
        header,
        num_changed=num_changed,
        base_check=checks[0],
        target_check=checks[1],
        classes=tuple(map(class_record_of, thresholds, records)),
        unary_bytes=streams.unary_bytes,
        plain_bytes=plain_bytes,
    ), body[:plain_bytes].data


def _count(
    library: ctypes.CDLL,
    shape: Shape,
    records: ctypes.Array[Record],
    pair: tuple[np.ndarray, np.ndarray],
    changed: np.ndarray,
) -> tuple[int, int]:
    """Fill in `changed` and the counts of the records; return the checksums of both arrays."""
    structs = ctypes.byref(shape), ctypes.byref(records), pointer(changed)
    checks = xxhash.xxh3_64(), xxhash.xxh3_64()
    for start, end in chunks_of(pair[0]):
        for check, array in zip(checks, pair, strict=True):
            # Hashed just before it is compared: the chunk is then in the cache.
            check.update(array[start:end].data)
        library.penstock_delta_count(*map(ctypes.c_int64, (start, end)), *structs)
    return checks[0].intdigest(), checks[1].intdigest()


def decode_steps(
    header: Header, base: np.ndarray, body: bytes | memoryview
) -> tuple[np.ndarray, np.ndarray]:
    """Decode as `portable.decode_steps` does, with the same result."""
    library = load_delta_library()
    if library is None:
        return portable.decode_steps(header, base, body)
    places = np.empty(header.num_changed, np.int64)
    values = np.empty(header.num_changed, base.dtype)
    walk = _read(library, header, base, body)
    structs = ctypes.byref(walk.shape), ctypes.byref(walk.series)
    _check_status(library.penstock_delta_decode(*structs, pointer(places), pointer(values)))
    return places, values


def apply_steps(
    header: Header, base: np.ndarray, body: bytes | memoryview, target: np.ndarray
) -> tuple[int, int]:
    """Write the target into `target`, which must not overlap `base`.

    Returns:
        Checksums of the base, which was not verified before, and of the target.

    Raises:
        ValueError: As for `portable.decode_steps`; the contents of `target` are then undefined.

    """
    library = load_delta_library()
    if library is None:
        # Without the compiled code there are no chunks; the arrays are hashed as a whole.
        target[...] = base
        places, values = portable.decode_steps(header, base, body)
        target[places] = values
        return check_of(base), check_of(target)
    walk = _read(library, header, base, body)
    structs = ctypes.byref(walk.shape), ctypes.byref(walk.series), pointer(target)
    checks = xxhash.xxh3_64(), xxhash.xxh3_64()
    for start, end in chunks_of(base):
        # The chunk of the base is hashed before, that of the target after it is written, both
        # while they are in the cache: arrays are read from memory once.
        checks[0].update(base[start:end].data)
        _check_status(library.penstock_delta_apply(*map(ctypes.c_int64, (start, end)), *structs))
        checks[1].update(target[start:end].data)
    return checks[0].intdigest(), checks[1].intdigest()


def tally(base: np.ndarray, target: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Count as `portable.tally` does, with the same result."""
    library = load_delta_library()
    if library is None:
        return portable.tally(base, target, dtype)
    counts = np.empty((2, 256), np.int64)
    shape = shape_of(dtype, [0], base, target)
    library.penstock_delta_tally(ctypes.byref(shape), pointer(counts))
    return counts[:, : dtype.traits.num_keys]


def _read(library: ctypes.CDLL, header: Header, base: np.ndarray, body: bytes | memoryview) -> Walk:
    """Read all series of a body, which also checks them."""
    parts = [np.frombuffer(part, np.uint8) for part in portable.split_body(header, body)]
    records = (Record * len(header.classes))(*map(record_of, header.classes))
    streams = Streams(*map(address, parts), parts[2].size, parts[3].size)
    thresholds = [record.first_key for record in header.classes]
    has_mask = header.codec is Codec.BITMASK_ULP
    shape = shape_of(header.dtype, thresholds, base, base, has_mask=has_mask)
    # As `penstock_delta_read` requires; `read_header` has bounded all of these counts.
    num_coded = sum(record.changed.num_coded for record in header.classes)
    num_numbers = num_coded + 3 * header.num_changed + len(header.classes)
    walk = Walk(shape, Series(), thread_buffer("numbers", 4 * num_numbers))
    structs = map(ctypes.byref, (shape, records, streams))
    numbers, series = pointer(walk.numbers), ctypes.byref(walk.series)
    _check_status(library.penstock_delta_read(*structs, numbers, series))
    return walk


def _check_status(status: int) -> None:
    if status:
        raise ValueError("a count, a position or a size is out of bounds")


@cache
def load_delta_library() -> ctypes.CDLL | None:
    """Return the compiled library, or None without a compiler."""
    return load_library(_SOURCE)
