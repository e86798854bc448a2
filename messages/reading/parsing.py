"""The one place where bytes of any origin become values: bounded, and with one error."""

import tomllib
from typing import Any, TypeVar

import msgspec

from penstock.messages.errors import CodecError

T = TypeVar("T")

INPUT_BYTES_MAX = 256 << 20
"""Of one value; decoding takes memory in proportion."""
TOML_CHARACTERS_MAX = 4 << 20
_CAUSE_CHARACTERS_MAX = 400
_FAULTS = (ValueError, RecursionError, MemoryError, OverflowError)
"""All that decoding raises: no msgpack or JSON, a wrong type (both are ValueErrors), text that is
not UTF-8, nesting too deep, a length or number beyond what there is."""


def parse_json(data: bytes | str, kind: type[T], what: str) -> T:
    """Decode JSON of one type.

    Raises:
        CodecError: Names `what` and the path inside it.

    """
    return parse_with(msgspec.json.Decoder(kind), data, what)


def parse_msgpack(data: bytes | memoryview, kind: type[T], what: str) -> T:
    """Decode msgpack of one type.

    Raises:
        CodecError: Names `what` and the path inside it.

    """
    return parse_with(msgspec.msgpack.Decoder(kind), data, what)


def parse_toml(text: str, what: str) -> dict[str, Any]:
    """Decode TOML, whose values may be of any type.

    Raises:
        CodecError: Names `what` and the line.

    """
    if len(text) > TOML_CHARACTERS_MAX:
        raise CodecError(f"{what}: expected at most {TOML_CHARACTERS_MAX} characters of TOML")
    try:
        return tomllib.loads(text)
    except _FAULTS as error:
        cause = f"{error or type(error).__name__}"[:_CAUSE_CHARACTERS_MAX]
        raise CodecError(f"{what}: not TOML: {cause}") from error


def parse_with(decoder: Any, data: bytes | str | memoryview, what: str) -> Any:
    """Decode with a decoder that is kept; raises as `parse_msgpack` does."""
    if len(data) > INPUT_BYTES_MAX:
        raise CodecError(f"{what}: expected at most {INPUT_BYTES_MAX} bytes, got {len(data)}")
    try:
        return decoder.decode(data)
    except _FAULTS as error:
        cause = f"{error or type(error).__name__}"[:_CAUSE_CHARACTERS_MAX]
        raise CodecError(f"{what} of {len(data)} bytes: {cause}") from error
