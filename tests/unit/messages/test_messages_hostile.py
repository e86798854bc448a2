"""Bytes that are no message are a `CodecError`, whatever is wrong with them."""

import pytest

from penstock.messages.codec import decode
from penstock.messages.errors import CodecError

HEAD = b"\x82\xa4type\xabRunFinished"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        HEAD,
        HEAD + b"\xa6reason\xa2\xff\xfe",
        b"\x82\xa4type\xa2\xff\xfe\xa1a\x01",
        HEAD + b"\xa1a" + b"\x91" * 100_000,
        HEAD + b"\xa1a\xdd\xff\xff\xff\xff",
        HEAD + b"\xa6reason\xc9\xff\xff\xff\xff\x01",
    ],
)
def test_bytes_that_are_no_message_are_named(data: bytes):
    with pytest.raises(CodecError, match=f"undecodable message of {len(data)} bytes"):
        decode(data)
