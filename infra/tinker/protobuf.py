"""Protobuf's wire format, without schemas: the few messages of the SDK need no generated code.

Source: https://protobuf.dev/programming-guides/encoding.
"""

import struct
from collections.abc import Iterator

from penstock.messages.errors import CodecError

Value = int | float | bytes
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5
_VARINT_BYTES_MAX = 10


def read_fields(data: bytes, what: str) -> Iterator[tuple[int, Value]]:
    """Yield the number and value of each field of a message; of messages, their bytes.

    Raises:
        CodecError: The bytes are not a message; the text begins with `what`.

    """
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at, what)
        wire = tag & 7
        if wire == _VARINT:
            value, at = _read_varint(data, at, what)
            yield tag >> 3, value
            continue
        if wire == _BYTES:
            size, at = _read_varint(data, at, what)
        elif wire in {_DOUBLE, _FLOAT}:
            size = 8 if wire == _DOUBLE else 4
        else:
            raise CodecError(f"{what}: expected protobuf, got wire type {wire}")
        part = data[at : at + size]
        if len(part) != size:
            raise CodecError(f"{what}: the protobuf message was cut short")
        at += size
        if wire == _BYTES:
            yield tag >> 3, part
        else:
            yield tag >> 3, float(struct.unpack("<d" if wire == _DOUBLE else "<f", part)[0])


def _read_varint(data: bytes, at: int, what: str) -> tuple[int, int]:
    value = 0
    for index in range(_VARINT_BYTES_MAX):
        if at + index >= len(data):
            break
        byte = data[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise CodecError(f"{what}: expected protobuf, got a number that does not end")


def field(number: int, value: Value | str) -> bytes:
    """Encode one field: numbers as varint or double, text and bytes with their length."""
    if isinstance(value, int):
        return _varint(number << 3 | _VARINT) + _varint(value)
    if isinstance(value, float):
        return _varint(number << 3 | _DOUBLE) + struct.pack("<d", value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | _BYTES) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
