"""What an earlier version wrote, this one reads; and so does any msgpack reader."""

import msgpack
import pytest
from tests.golden.write import FOLDER

from penstock.messages.codec import MESSAGES, decode, encode
from penstock.messages.errors import CodecError


def unpack(data: bytes) -> dict:
    return msgpack.unpackb(data, strict_map_key=False)


def golden(message_type) -> bytes:
    return (FOLDER / f"{message_type.__name__}.msgpack").read_bytes()


def test_there_is_one_golden_file_for_each_message():
    assert {path.stem for path in FOLDER.glob("*.msgpack")} == {m.__name__ for m in MESSAGES}


@pytest.mark.parametrize("message_type", MESSAGES, ids=lambda m: m.__name__)
def test_golden_bytes_survive_a_round_trip(message_type):
    data = golden(message_type)
    message = decode(data)
    assert type(message) is message_type
    fields = unpack(data)
    assert fields["type"] == message_type.__name__
    assert unpack(encode(message)) == fields


@pytest.mark.parametrize("message_type", MESSAGES, ids=lambda m: m.__name__)
def test_unknown_fields_are_ignored(message_type):
    data = golden(message_type)
    newer = msgpack.packb(unpack(data) | {"a_field_of_the_future": [1, {"x": 2}]})
    assert decode(newer) == decode(data)


@pytest.mark.parametrize("message_type", MESSAGES, ids=lambda m: m.__name__)
def test_a_field_of_a_wrong_type_raises_with_its_path(message_type):
    fields = unpack(golden(message_type))
    for name in fields.keys() - {"type"}:
        with pytest.raises(CodecError, match=rf"\$\.{name}"):
            decode(msgpack.packb(fields | {name: msgpack.ExtType(5, b"x")}))


def test_bytes_that_are_no_message_raise():
    for data in (b"", b"\xc1", msgpack.packb([1]), msgpack.packb({"type": "Nothing"})):
        with pytest.raises(CodecError):
            decode(data)
