"""Decoders for bytes from any source, bounded in size and with a single error class."""

import tomllib
from typing import Any, TypeVar

import msgspec

from penstock.messages.errors import CodecError

T = TypeVar("T")

INPUT_BYTES_MAX = 256 << 20
"""Maximum size of one encoded value, because decoding takes memory in proportion."""
TOML_CHARACTERS_MAX = 4 << 20
"""Maximum length of a TOML text."""
_CAUSE_CHARACTERS_MAX = 400
# Exceptions that decoders raise: ValueError for malformed input, a wrong type or invalid UTF-8,
# the others for input that is nested too deeply or has a length or number out of range.
_FAULTS = (ValueError, RecursionError, MemoryError, OverflowError)


def parse_json(data: bytes | str, kind: type[T], what: str) -> T:
    """Decode JSON as one type.

    Raises:
        CodecError: Names `what` and the path inside it.

    """
    return parse_with(msgspec.json.Decoder(kind), data, what)


def parse_msgpack(data: bytes | memoryview, kind: type[T], what: str) -> T:
    """Decode msgpack as one type.

    Raises:
        CodecError: Names `what` and the path inside it.

    """
    return parse_with(msgspec.msgpack.Decoder(kind), data, what)


def parse_toml(text: str, what: str) -> dict[str, Any]:
    """Decode a TOML document.

    Raises:
        CodecError: Names `what` and the line.

    """
    if len(text) > TOML_CHARACTERS_MAX:
        raise CodecError(f"{what}: expected at most {TOML_CHARACTERS_MAX} characters of TOML")
    try:
        return tomllib.loads(text)
    except _FAULTS as error:
        # Errors may quote the input: cut, or a large input would end up in logs and dead letters.
        cause = f"{error or type(error).__name__}"[:_CAUSE_CHARACTERS_MAX]
        raise CodecError(f"{what}: not TOML: {cause}") from error


def parse_with(decoder: Any, data: bytes | str | memoryview, what: str) -> Any:
    """Decode with a given, reusable decoder; raises like `parse_msgpack`."""
    # Before decoding, whose memory grows with the input.
    if len(data) > INPUT_BYTES_MAX:
        raise CodecError(f"{what}: expected at most {INPUT_BYTES_MAX} bytes, got {len(data)}")
    try:
        return decoder.decode(data)
    except _FAULTS as error:
        cause = f"{error or type(error).__name__}"[:_CAUSE_CHARACTERS_MAX]
        raise CodecError(f"{what} of {len(data)} bytes: {cause}") from error
