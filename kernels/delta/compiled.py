"""Marks and steps by the compiled code in `delta.c`, or by its portable twin without a compiler.

The calls release the interpreter lock, so that several threads code several arrays at once.
"""

import ctypes
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from penstock.kernels.delta import portable
from penstock.kernels.delta.classes import NUM_CLASSES_MAX
from penstock.kernels.delta.header import ClassRecord, Codec, Header, MarksRecord
from penstock.kernels.native import load_library

_SOURCE = Path(__file__).with_name("delta.c")
_NO_MEMORY, _CORRUPT = -1, -2
_SLACK_BYTES = 2048
"""Room that the writer of a string wants beyond what it fills."""


class _Shape(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("num_elements", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("itemsize", "bits", "is_float", "key_shift")),
        ("key_mask", ctypes.c_uint32),
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
) -> tuple[Header, bytes]:
    """Do what `portable.encode_steps` does, with the same bytes."""
    library = load_delta_library()
    if library is None:
        return portable.encode_steps(header, thresholds, base, target)
    has_mask = header.codec is Codec.BITMASK_ULP
    flag_bytes = -(-base.size // 8)
    mask = np.empty(flag_bytes if has_mask else 0, np.uint8)
    signs = np.zeros(flag_bytes, np.uint8)
    unary, low = (np.empty(header.plain_bytes_max + _SLACK_BYTES, np.uint8) for _ in range(2))
    records = (_Record * len(thresholds))()
    streams = _Streams(*map(_address, (mask, signs, unary, low)), unary.size, low.size)
    shape = _shape(header, thresholds, base, target)
    status = library.penstock_delta_encode(
        ctypes.byref(shape), ctypes.byref(records), ctypes.byref(streams)
    )
    if status:
        raise MemoryError(f"no memory to encode {base.size} elements")
    classes = tuple(map(_class_record, thresholds, records))
    num_changed = sum(record.num_changed for record in classes)
    used = (signs[: -(-num_changed // 8)], unary[: streams.unary_bytes], low[: streams.low_bytes])
    body = b"".join((mask, *used))
    return msgspec.structs.replace(
        header,
        num_changed=num_changed,
        classes=classes,
        unary_bytes=streams.unary_bytes,
        plain_bytes=len(body),
    ), body


def decode_steps(header: Header, base: np.ndarray, body: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Do what `portable.decode_steps` does, with the same result."""
    library = load_delta_library()
    if library is None:
        return portable.decode_steps(header, base, body)
    parts = [np.frombuffer(part, np.uint8) for part in portable.split_body(header, body)]
    places = np.empty(header.num_changed, np.int64)
    values = np.empty(header.num_changed, base.dtype)
    records = (_Record * len(header.classes))(*map(_record, header.classes))
    streams = _Streams(*map(_address, parts), parts[2].size, parts[3].size)
    shape = _shape(header, [record.first_key for record in header.classes], base, base)
    status = library.penstock_delta_decode(
        ctypes.byref(shape),
        ctypes.byref(records),
        ctypes.byref(streams),
        ctypes.c_int64(header.num_changed),
        ctypes.c_void_p(_address(places)),
        ctypes.c_void_p(_address(values)),
    )
    if status == _NO_MEMORY:
        raise MemoryError(f"no memory to decode {header.num_changed} changes")
    if status == _CORRUPT:
        raise ValueError("a count, a place or a size is out of its bounds")
    return places, values


@cache
def load_delta_library() -> ctypes.CDLL | None:
    """Compile or load `delta.c`; None without a compiler."""
    return load_library(_SOURCE)


def _shape(header: Header, thresholds: list[int], base: np.ndarray, target: np.ndarray) -> _Shape:
    traits = header.dtype.traits
    return _Shape(
        _address(base),
        _address(target),
        base.size,
        *(traits.itemsize, traits.bits, traits.is_float, traits.key_shift, traits.key_mask),
        len(thresholds),
        header.codec is Codec.BITMASK_ULP,
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


def _address(array: np.ndarray) -> int:
    return array.ctypes.data
