"""Messages to and from msgpack maps, readable by any msgpack reader."""

from functools import reduce
from typing import Any

import msgspec

from penstock.messages.base import Message
from penstock.messages.catalog import MESSAGES
from penstock.messages.errors import CodecError


def _either(a: Any, b: Any) -> Any:
    return a | b


_UNION: Any = reduce(_either, MESSAGES)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(_UNION)


def encode(message: Message) -> bytes:
    """Encode to one msgpack map with a `type` entry, fields in the order of their declaration."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """Decode any message of the catalog.

    Raises:
        CodecError: Not msgpack, an unknown `type`, or a field of a wrong type (with its path).

    """
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise CodecError(f"undecodable message of {len(data)} bytes: {error}") from error
