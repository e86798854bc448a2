"""What `delta.c` is called with: its structs, field by field, and how they are filled."""

import ctypes
from typing import NamedTuple

import numpy as np

from penstock.kernels.delta.classes import NUM_CLASSES_MAX
from penstock.kernels.delta.dtypes import Dtype
from penstock.kernels.delta.header import ClassRecord, MarksRecord


class Shape(ctypes.Structure):
    """Two arrays of elements, and their classes."""

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
    """The coding of one class, as in `ClassRecord`."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("num_changed", "num_coded", "inverted", "num_large_coded", "large_inverted")
    ]


class Streams(ctypes.Structure):
    """The parts of a body."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("mask", "signs", "unary", "low")),
        ("unary_bytes", ctypes.c_int64),
        ("low_bytes", ctypes.c_int64),
    ]


Series = ctypes.c_int64 * 128
"""All series of a body, and how far they are walked."""


class Walk(NamedTuple):
    """A body that was read, on its way to a target."""

    shape: Shape
    series: ctypes.Array[ctypes.c_int64]
    numbers: np.ndarray
    """What the series point into."""


def shape_of(
    dtype: Dtype,
    thresholds: list[int],
    base: np.ndarray,
    target: np.ndarray,
    *,
    has_mask: bool = False,
) -> Shape:
    """Describe two arrays [N] of elements, and the classes of the first."""
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
    """Return what a class that was encoded is told by."""
    return ClassRecord(
        first_key=first_key,
        num_changed=record.num_changed,
        changed=MarksRecord(record.num_coded, bool(record.inverted)),
        large=MarksRecord(record.num_large_coded, bool(record.large_inverted)),
    )


def record_of(record: ClassRecord) -> Record:
    """Invert `class_record_of`, but for the key."""
    return Record(
        record.num_changed,
        *(record.changed.num_coded, record.changed.inverted),
        *(record.large.num_coded, record.large.inverted),
    )


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    """Return where an array begins, as an argument."""
    return ctypes.c_void_p(array.ctypes.data)


def address(array: np.ndarray) -> int:
    """Return where an array begins, as a field."""
    return array.ctypes.data
