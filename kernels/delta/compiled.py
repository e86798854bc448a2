"""Marks and steps by the compiled code in `delta.c`, or by its portable twin without a compiler.

The calls release the interpreter lock, so that several threads code several arrays at once.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from penstock.kernels.delta import portable
from penstock.kernels.delta.classes import NUM_CLASSES_MAX
from penstock.kernels.delta.dtypes import Dtype
from penstock.kernels.delta.header import ClassRecord, Codec, Header, MarksRecord
from penstock.kernels.delta.scratch import room
from penstock.kernels.native import load_library

_SOURCE = Path(__file__).with_name("delta.c")
_SLACK_BYTES = 2048
"""Room that the writer of a string wants beyond what it fills."""
_GROUP_ELEMENTS = 1024
_NUMBER_BYTES_MAX = 5
"""Of a number in either string: 33 bits, and its share of its block's parameter."""


class _Shape(ctypes.Structure):
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


class _Record(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("num_changed", "num_coded", "inverted", "num_large_coded", "large_inverted")
    ]


class _Streams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("mask", "signs", "unary", "low")),
        ("unary_bytes", ctypes.c_int64),
        ("low_bytes", ctypes.c_int64),
    ]


def encode_steps(
    header: Header, thresholds: list[int], base: np.ndarray, target: np.ndarray
) -> tuple[Header, bytes | memoryview]:
    """Do what `portable.encode_steps` does, with the same bytes.

    The body is this thread's until its next call.
    """
    library = load_delta_library()
    if library is None:
        return portable.encode_steps(header, thresholds, base, target)
    records = (_Record * len(thresholds))()
    has_mask = header.codec is Codec.BITMASK_ULP
    shape = _shape(header.dtype, thresholds, base, target, has_mask=has_mask)
    changed = room("changed", -(-base.size // _GROUP_ELEMENTS) * _GROUP_ELEMENTS // 8)
    structs = tuple(map(ctypes.byref, (shape, records)))
    library.penstock_delta_count(*structs, _pointer(changed))
    num_changed = sum(record.num_changed for record in records)
    num_numbers = 3 * num_changed + 1
    begin = portable.flag_bytes(header, num_changed)
    string_bytes = min(num_numbers * _NUMBER_BYTES_MAX, header.plain_bytes_max) + _SLACK_BYTES
    body, low = room("body", sum(begin) + 2 * string_bytes), room("low", string_bytes)
    mask, signs, unary = np.split(body, np.cumsum(begin))
    streams = _Streams(*map(_address, (mask, signs, unary, low)), string_bytes, string_bytes)
    numbers = room("numbers", 4 * num_numbers)
    status = library.penstock_delta_encode(
        *structs, _pointer(changed), _pointer(numbers), ctypes.byref(streams)
    )
    if status:
        raise MemoryError(f"no memory to encode {base.size} elements")
    unary[streams.unary_bytes :][: streams.low_bytes] = low[: streams.low_bytes]
    plain_bytes = sum(begin) + streams.unary_bytes + streams.low_bytes
    return msgspec.structs.replace(
        header,
        num_changed=num_changed,
        classes=tuple(map(_class_record, thresholds, records)),
        unary_bytes=streams.unary_bytes,
        plain_bytes=plain_bytes,
    ), body[:plain_bytes].data


def decode_steps(
    header: Header, base: np.ndarray, body: bytes | memoryview
) -> tuple[np.ndarray, np.ndarray]:
    """Do what `portable.decode_steps` does, with the same result."""
    library = load_delta_library()
    if library is None:
        return portable.decode_steps(header, base, body)
    places = np.empty(header.num_changed, np.int64)
    values = np.empty(header.num_changed, base.dtype)
    _read(library.penstock_delta_decode, header, base, body, places, values)
    return places, values


def apply_steps(
    header: Header, base: np.ndarray, body: bytes | memoryview, target: np.ndarray
) -> None:
    """Write to `target` what `base` becomes; they share no memory.

    Raises:
        ValueError: as `portable.decode_steps`; what `target` holds then is undefined.

    """
    library = load_delta_library()
    if library is None:
        target[...] = base
        places, values = portable.decode_steps(header, base, body)
        target[places] = values
    else:
        _read(library.penstock_delta_apply, header, base, body, target)


def tally(base: np.ndarray, target: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Do what `portable.tally` does, with the same result."""
    library = load_delta_library()
    if library is None:
        return portable.tally(base, target, dtype)
    counts = np.empty((2, 256), np.int64)
    shape = _shape(dtype, [0], base, target)
    library.penstock_delta_tally(ctypes.byref(shape), _pointer(counts))
    return counts[:, : dtype.traits.num_keys]


def _read(
    function: Callable[..., int],
    header: Header,
    base: np.ndarray,
    body: bytes | memoryview,
    *outputs: np.ndarray,
) -> None:
    parts = [np.frombuffer(part, np.uint8) for part in portable.split_body(header, body)]
    records = (_Record * len(header.classes))(*map(_record, header.classes))
    streams = _Streams(*map(_address, parts), parts[2].size, parts[3].size)
    thresholds = [record.first_key for record in header.classes]
    has_mask = header.codec is Codec.BITMASK_ULP
    shape = _shape(header.dtype, thresholds, base, base, has_mask=has_mask)
    num_coded = sum(record.changed.num_coded for record in header.classes)
    num_numbers = num_coded + 2 * header.num_changed + 2 * len(header.classes)
    numbers = room("numbers", 4 * num_numbers)
    structs = map(ctypes.byref, (shape, records, streams))
    if function(*structs, _pointer(numbers), *map(_pointer, outputs)):
        raise ValueError("a count, a place or a size is out of its bounds")


@cache
def load_delta_library() -> ctypes.CDLL | None:
    """Compile or load `delta.c`; None without a compiler."""
    return load_library(_SOURCE)


def _shape(
    dtype: Dtype,
    thresholds: list[int],
    base: np.ndarray,
    target: np.ndarray,
    *,
    has_mask: bool = False,
) -> _Shape:
    traits = dtype.traits
    return _Shape(
        _address(base),
        _address(target),
        base.size,
        *(traits.itemsize, traits.bits, traits.is_float, traits.key_shift, traits.num_keys - 1),
        len(thresholds),
        has_mask,
        (ctypes.c_int32 * NUM_CLASSES_MAX)(*thresholds),
    )


def _class_record(first_key: int, record: _Record) -> ClassRecord:
    return ClassRecord(
        first_key=first_key,
        num_changed=record.num_changed,
        changed=MarksRecord(record.num_coded, bool(record.inverted)),
        large=MarksRecord(record.num_large_coded, bool(record.large_inverted)),
    )


def _record(record: ClassRecord) -> _Record:
    return _Record(
        record.num_changed,
        *(record.changed.num_coded, record.changed.inverted),
        *(record.large.num_coded, record.large.inverted),
    )


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _address(array: np.ndarray) -> int:
    return array.ctypes.data
