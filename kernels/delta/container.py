"""The byte layout of one delta payload, and its strict parser.

```
 offset  bytes  field                                     all integers little-endian
      0      4  magic "PSDX"
      4      1  format version, 1
      5      1  codec (`Codec`)
      6      1  element size in bytes: 1, 2 or 4
      7      1  number of classes, C <= 16
      8      8  number of elements, N <= 2**28
     16      8  number of changed elements, K <= N
     24      8  xxh3-64 of the base's bytes
     32      8  xxh3-64 of the target's bytes
     40   20*C  classes: first key u8; of the changed: shift u8, inverted u8; of the large steps:
               shift u8, inverted u8; 3 zero bytes; changed: coded u32; large: coded u32;
               number of changed u32
               then per stream, S = 9*C (raw: the element size): raw length u32, stored length u32
               the streams, one after the other; one whose stored length is less than its raw
               length is a zstd frame, else it is plain
    end-8     8  xxh3-64 of all bytes before
```
The nine streams of a class: gap bytes, low bits and escapes of the changed ranks; signs; gap bytes,
low bits and escapes of the large steps among the changed; sizes and escapes of the large steps.
A parser reads nothing that it has not bounded: lengths are checked against N and against the
payload before any buffer is made, and the checksum before anything is decoded.
"""

import struct

import xxhash
import zstandard

from penstock.kernels.delta.gaps import SHIFT_MAX, MarksRecord
from penstock.kernels.delta.header import (
    NUM_CLASSES_MAX,
    NUM_ELEMENTS_MAX,
    ClassRecord,
    Codec,
    Header,
)
from penstock.messages.errors import CorruptDataError

MAGIC = b"PSDX"
FORMAT_VERSION = 1
_FIXED = struct.Struct("<4sBBBBQQQQ")
_CLASS = struct.Struct("<BBBBBxxxIII")
_STREAM = struct.Struct("<II")
_CHECK_BYTES = 8
_ZSTD_LEVEL = 1


def pack(header: Header, streams: list[bytes]) -> bytes:
    """Lay out one payload; `streams` are plain, and are compressed here where that helps."""
    stored = [_compress(stream) for stream in streams]
    parts = [
        _FIXED.pack(
            MAGIC,
            FORMAT_VERSION,
            header.codec,
            header.itemsize,
            len(header.classes),
            header.num_elements,
            header.num_changed,
            header.base_check,
            header.target_check,
        ),
        *(
            _CLASS.pack(
                c.first_key,
                c.changed.shift,
                c.changed.inverted,
                c.large.shift,
                c.large.inverted,
                c.changed.num_coded,
                c.large.num_coded,
                c.num_changed,
            )
            for c in header.classes
        ),
        *(_STREAM.pack(len(s), len(p)) for s, p in zip(streams, stored, strict=True)),
        *stored,
    ]
    body = b"".join(parts)
    return body + checksum(body)


def checksum(body: bytes | bytearray | memoryview) -> bytes:
    """Return what ends a payload: the xxh3-64 of all bytes before."""
    return xxhash.xxh3_64_intdigest(body).to_bytes(_CHECK_BYTES, "little")


def read_header(payload: bytes | memoryview) -> Header:
    """Parse and check what stands before the streams.

    Raises:
        CorruptDataError: not a payload of this format, or a field out of its bounds.

    """
    return _read_header(memoryview(payload))[0]


def unpack(payload: bytes | memoryview) -> tuple[Header, list[bytes]]:
    """Parse a payload into its header and plain streams.

    Raises:
        CorruptDataError: truncated, foreign, damaged, or with lengths that do not add up.

    """
    view = memoryview(payload)
    header, offset = _read_header(view)
    body = view[:-_CHECK_BYTES]
    if checksum(body) != bytes(view[-_CHECK_BYTES:]):
        raise CorruptDataError("delta: the checksum does not match; the payload is damaged")
    table_end = offset + _STREAM.size * header.num_streams
    if table_end > len(body):
        raise CorruptDataError("delta.streams: the table of streams is cut short")
    lengths = list(_STREAM.iter_unpack(body[offset:table_end]))
    if table_end + sum(stored for _, stored in lengths) != len(body):
        raise CorruptDataError("delta.streams: the lengths do not add up to the payload's")
    if sum(plain for plain, _ in lengths) > header.plain_bytes_max:
        raise CorruptDataError(f"delta.streams: more than {header.plain_bytes_max} bytes unpacked")
    streams: list[bytes] = []
    for plain_bytes, stored_bytes in lengths:
        streams.append(_decompress(body[table_end : table_end + stored_bytes], plain_bytes))
        table_end += stored_bytes
    return header, streams


def _read_header(view: memoryview) -> tuple[Header, int]:
    if len(view) < _FIXED.size + _CHECK_BYTES:
        raise CorruptDataError(f"delta: {len(view)} bytes are too few for a header")
    magic, version, codec, itemsize, num_classes, *numbers = _FIXED.unpack_from(view)
    if magic != MAGIC:
        raise CorruptDataError(f"delta.magic: expected {MAGIC!r}, got {magic!r}")
    if version != FORMAT_VERSION:
        raise CorruptDataError(f"delta.version: expected {FORMAT_VERSION}, got {version}")
    if codec not in Codec.__members__.values():
        raise CorruptDataError(f"delta.codec: expected one of {list(map(int, Codec))}, got {codec}")
    num_elements, num_changed, base_check, target_check = numbers
    if itemsize not in (1, 2, 4) or num_changed > num_elements or num_elements > NUM_ELEMENTS_MAX:
        raise CorruptDataError(
            f"delta: {num_changed} changed of {num_elements} elements of {itemsize} bytes is not"
            f" within the format's bounds (1, 2 or 4 bytes, at most {NUM_ELEMENTS_MAX} elements)"
        )
    offset = _FIXED.size
    end = offset + num_classes * _CLASS.size
    if num_classes > NUM_CLASSES_MAX or end + _CHECK_BYTES > len(view):
        raise CorruptDataError(f"delta.classes: {num_classes} classes do not fit")
    header = Header(
        codec=Codec(codec),
        itemsize=itemsize,
        num_elements=num_elements,
        num_changed=num_changed,
        base_check=base_check,
        target_check=target_check,
        classes=tuple(_class_record(r) for r in _CLASS.iter_unpack(view[offset:end])),
    )
    _check_classes(header)
    return header, end


def _class_record(fields: tuple[int, ...]) -> ClassRecord:
    first_key, shift, inverted, large_shift, large_inverted, *counts = fields
    return ClassRecord(
        first_key=first_key,
        num_changed=counts[2],
        changed=MarksRecord(shift, bool(inverted), counts[0]),
        large=MarksRecord(large_shift, bool(large_inverted), counts[1]),
    )


def _check_classes(header: Header) -> None:
    keys = [record.first_key for record in header.classes]
    coded = header.codec in (Codec.GAP_ULP, Codec.CLASS_GAP_ULP)
    if coded != bool(keys) or keys != sorted(set(keys)) or (keys and keys[0] != 0):
        raise CorruptDataError(f"delta.classes: keys {keys} do not fit codec {header.codec.name}")
    if header.codec is Codec.GAP_ULP and len(keys) != 1:
        raise CorruptDataError(f"delta.classes: gap_ulp has one class, got {len(keys)}")
    if coded and sum(record.num_changed for record in header.classes) != header.num_changed:
        raise CorruptDataError("delta.classes: their changes do not add up to the header's")
    marks = [marks for record in header.classes for marks in (record.changed, record.large)]
    if any(m.shift > SHIFT_MAX or m.num_coded > header.num_elements for m in marks):
        raise CorruptDataError("delta.classes: a shift or a count is out of bounds")


def _compress(stream: bytes) -> bytes:
    packed = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(stream)
    return packed if len(packed) < len(stream) else stream


def _decompress(stored: memoryview, plain_bytes: int) -> bytes:
    if len(stored) == plain_bytes:
        return bytes(stored)
    try:
        if zstandard.frame_content_size(stored) != plain_bytes:
            raise CorruptDataError("delta.streams: a zstd frame has another size than the table's")
        return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"delta.streams: not a zstd frame: {error}") from error
