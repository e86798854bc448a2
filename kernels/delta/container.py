"""Byte layout of a delta payload, and its strict parser; see `docs/weight-format.md`.

```
 offset  bytes  field                                     all integers little-endian
      0      4  magic "PSDX"
      4      1  format version, 1
      5      1  codec (`Codec`)
      6      1  element type (`Dtype`)
      7      1  number of classes, C <= 16
      8      8  number of elements, N <= 2**28
     16      8  number of changed elements, K <= N
     24      8  xxh3-64 of the base's bytes
     32      8  xxh3-64 of the target's bytes
     40      -  four LEB128 numbers per class: first key; number of changed elements; twice the
                number of coded places, plus 1 if these are the unchanged elements; the same for
                the large steps
                two LEB128 numbers: length of the unary string, length of the plain body
                the body, as one zstd frame if it is shorter than its plain length
    end-8    8  xxh3-64 of all bytes before
```
The parser bounds everything before using it: counts are checked against N and each other before
buffers are allocated, and the checksum before anything is decoded.
"""

import struct
import threading

import xxhash
import zstandard

from penstock.kernels.delta.dtypes import Dtype
from penstock.kernels.delta.header import (
    NUM_CLASSES_MAX,
    NUM_ELEMENTS_MAX,
    ClassRecord,
    Codec,
    Header,
    MarksRecord,
)
from penstock.messages.errors import CorruptDataError

MAGIC = b"PSDX"
FORMAT_VERSION = 1
_FIXED = struct.Struct("<4sBBBBQQQQ")
_CHECK_BYTES = 8
_ZSTD_LEVEL = 1
_LEB128_BYTES_MAX = 5


class _Zstd(threading.local):
    """Compression contexts of one thread, because they are not thread-safe."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def pack(header: Header, body: bytes | memoryview) -> bytes:
    """Return the payload for a header and a plain body, which is compressed if that helps."""
    head = _FIXED.pack(
        MAGIC,
        FORMAT_VERSION,
        header.codec,
        header.dtype,
        len(header.classes),
        header.num_elements,
        header.num_changed,
        header.base_check,
        header.target_check,
    )
    numbers = [number for record in header.classes for number in _class_numbers(record)]
    table = b"".join(map(leb128, (*numbers, header.unary_bytes, header.plain_bytes)))
    # Kept plain if compression does not help; the lengths tell readers which it is.
    packed = compress(body) if body else body
    parts = (head, table, packed if len(packed) < len(body) else body)
    check = xxhash.xxh3_64()
    for part in parts:
        check.update(part)
    return b"".join((*parts, _check_bytes(check.intdigest())))


def compress(data: bytes | memoryview) -> bytes:
    """Compress bytes with zstd."""
    return _zstd.compressor.compress(data)


def checksum(body: bytes | bytearray | memoryview) -> bytes:
    """Return the last bytes of a payload: the xxh3-64 of all bytes before."""
    return _check_bytes(xxhash.xxh3_64_intdigest(body))


def read_header(payload: bytes | memoryview) -> Header:
    """Parse and check the header of a payload.

    Raises:
        CorruptDataError: The payload is not of this format, or a field is out of bounds.

    """
    return _read_header(memoryview(payload))[0]


def unpack(payload: bytes | memoryview) -> tuple[Header, memoryview]:
    """Split a payload into its header and its body as stored.

    Raises:
        CorruptDataError: The payload is truncated, damaged or not of this format.

    """
    view = memoryview(payload)
    header, offset = _read_header(view)
    whole = view[:-_CHECK_BYTES]
    if checksum(whole) != bytes(view[-_CHECK_BYTES:]):
        raise CorruptDataError("delta: the checksum does not match; the payload is damaged")
    return header, whole[offset:]


def plain_body(header: Header, stored: memoryview) -> bytes | memoryview:
    """Return the plain body; the stored one itself if it is not compressed.

    Raises:
        CorruptDataError: The length is wrong, or the body is not a zstd frame.

    """
    if len(stored) == header.plain_bytes:
        return stored
    try:
        if zstandard.frame_content_size(stored) != header.plain_bytes:
            # Compared before decompressing, so that a forged frame cannot use up memory.
            raise CorruptDataError("delta.body: the zstd frame's size differs from the header's")
        return _zstd.decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"delta.body: not a zstd frame: {error}") from error


def _read_header(view: memoryview) -> tuple[Header, int]:
    """Return the header and the offset of the body."""
    if len(view) < _FIXED.size + _CHECK_BYTES:
        raise CorruptDataError(f"delta: {len(view)} bytes are too few for a header")
    magic, version, codec, dtype, num_classes, *numbers = _FIXED.unpack_from(view)
    if magic != MAGIC:
        raise CorruptDataError(f"delta.magic: expected {MAGIC!r}, got {magic!r}")
    if version != FORMAT_VERSION:
        raise CorruptDataError(f"delta.version: expected {FORMAT_VERSION}, got {version}")
    if codec not in Codec.__members__.values():
        raise CorruptDataError(f"delta.codec: expected one of {list(map(int, Codec))}, got {codec}")
    if dtype not in Dtype.__members__.values():
        raise CorruptDataError(f"delta.dtype: expected one of {list(map(int, Dtype))}, got {dtype}")
    num_elements, num_changed, base_check, target_check = numbers
    if num_changed > num_elements or num_elements > NUM_ELEMENTS_MAX:
        raise CorruptDataError(
            f"delta: {num_changed} changed of {num_elements} elements, of at most"
            f" {NUM_ELEMENTS_MAX}"
        )
    if dtype == Dtype.INT4X2 and num_elements % 2:
        raise CorruptDataError(f"delta: {num_elements} half bytes do not fill whole bytes")
    # `N` is bounded by now, so all later checks are relative to it.
    table = TableReader(view[_FIXED.size : -_CHECK_BYTES])
    if num_classes > NUM_CLASSES_MAX:
        raise CorruptDataError(f"delta.classes: at most {NUM_CLASSES_MAX}, got {num_classes}")
    header = Header(
        codec=Codec(codec),
        dtype=Dtype(dtype),
        num_elements=num_elements,
        num_changed=num_changed,
        base_check=base_check,
        target_check=target_check,
        classes=tuple(_read_class(table) for _ in range(num_classes)),
        unary_bytes=table.read(),
        plain_bytes=table.read(),
    )
    _check(header)
    return header, _FIXED.size + table.offset


def _class_numbers(record: ClassRecord) -> tuple[int, ...]:
    marks = (2 * m.num_coded + m.inverted for m in (record.changed, record.large))
    return (record.first_key, record.num_changed, *marks)


def _read_class(table: "TableReader") -> ClassRecord:
    first_key, num_changed, changed, large = (table.read() for _ in range(4))
    return ClassRecord(
        first_key=first_key,
        num_changed=num_changed,
        changed=MarksRecord(changed >> 1, bool(changed & 1)),
        large=MarksRecord(large >> 1, bool(large & 1)),
    )


def _check(header: Header) -> None:
    """Check that the fields are consistent with each other."""
    traits = header.dtype.traits
    keys = [record.first_key for record in header.classes]
    if (
        header.codec.has_steps != bool(keys)
        or keys != sorted(set(keys))
        or keys[:1] not in ([], [0])
    ):
        raise CorruptDataError(f"delta.classes: keys {keys} do not fit codec {header.codec.name}")
    if header.codec is not Codec.CLASS_GAP_ULP and len(keys) > 1:
        raise CorruptDataError(f"delta.classes: {header.codec.name} has one class, got {len(keys)}")
    if keys and (keys[-1] >= traits.num_keys or not traits.has_steps):
        raise CorruptDataError(f"delta.classes: keys {keys} do not fit {header.dtype.name}")
    if keys and sum(record.num_changed for record in header.classes) != header.num_changed:
        raise CorruptDataError("delta.classes: changes do not add up to the header's number")
    # The decoder allocates memory by these counts and indexes with them.
    if sum(record.changed.num_coded for record in header.classes) > header.num_elements:
        raise CorruptDataError("delta.classes: more places are coded than there are elements")
    if any(record.large.num_coded > record.num_changed for record in header.classes):
        raise CorruptDataError("delta.classes: more large steps than changes")
    # Each number takes at least one bit of the unary string.
    numbers = (r.changed.num_coded + r.large.num_coded + r.num_large for r in header.classes)
    if sum(numbers) > 8 * header.unary_bytes:
        raise CorruptDataError("delta.classes: the unary string is too short for their numbers")
    if header.plain_bytes > header.plain_bytes_max or header.unary_bytes > header.plain_bytes:
        raise CorruptDataError(
            f"delta.body: {header.unary_bytes} of {header.plain_bytes} bytes unpacked, of at most"
            f" {header.plain_bytes_max}"
        )


def _check_bytes(check: int) -> bytes:
    return check.to_bytes(_CHECK_BYTES, "little")


def leb128(number: int) -> bytes:
    """Encode a number with 7 bits per byte, lowest first; a set high bit means that more follow."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


class TableReader:
    """Reader of consecutive LEB128 numbers."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.offset = 0

    def read(self) -> int:
        """Return the next number.

        Raises:
            CorruptDataError: The number is cut short or too long.

        """
        value = 0
        for shift in range(0, 7 * _LEB128_BYTES_MAX, 7):
            if self.offset >= len(self._view):
                raise CorruptDataError("delta.table: cut short")
            byte = self._view[self.offset]
            self.offset += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise CorruptDataError(f"delta.table: a number of more than {_LEB128_BYTES_MAX} bytes")
