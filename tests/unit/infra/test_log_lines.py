"""`log cat` shows events of any version, and what dead letters hold."""

import json
from collections.abc import AsyncIterator

import msgpack

from penstock.infra.bus.jetstream.log_reader import RawMessage
from penstock.infra.commands.log import cat_log, plain_map
from penstock.messages.base import Stream
from penstock.messages.codec import encode
from penstock.messages.control import MessageRejected, RunFinished


def stored(kind: str, data: bytes, stream: Stream = Stream.CONTROL) -> RawMessage:
    return RawMessage(
        stream=stream, sequence=7, subject=f"ps.r1.{stream}.{kind}.key", stored_at=1.0, data=data
    )


async def lines(*messages: RawMessage, types: tuple[str, ...] = ()) -> list[dict]:
    async def each() -> AsyncIterator[RawMessage]:
        for message in messages:
            yield message

    return [json.loads(line) async for line in cat_log(each(), types)]


async def test_events_of_this_and_of_another_version_are_plain_maps():
    known = stored("RunFinished", encode(RunFinished(reason="done", step=3)))
    other = {"type": "RunPaused", "at": 1.5, "ids": ["int32", [2], b"x" * 8], "by": {1: b"ab"}}
    foreign = stored("RunPaused", msgpack.packb(other))
    assert await lines(known, foreign) == [
        {"stream": "control", "sequence": 7, "type": "RunFinished", "reason": "done", "step": 3},
        {"stream": "control", "sequence": 7, "type": "RunPaused", "at": 1.5, "ids": "int32[2]",
         "by": {"1": "<2 bytes>"}},
    ]  # fmt: skip


async def test_only_the_asked_types_are_shown():
    messages = [stored(kind, msgpack.packb({"type": kind})) for kind in ("A", "B", "A")]
    assert [line["type"] for line in await lines(*messages, types=("A",))] == ["A", "A"]


def rejected(data: bytes) -> RawMessage:
    letter = MessageRejected(
        source_stream="tasks", source_sequence=1, source_subject="s", actor="a", cause="c",
        data=data,
    )  # fmt: skip
    return stored("MessageRejected", encode(letter), Stream.DLQ)


async def test_a_dead_letter_is_opened_where_it_holds_a_map():
    old = msgpack.packb({"type": "Old", "n": 1})
    opened, closed = await lines(rejected(old), rejected(b"\xc1"))
    assert opened["data"] == {"type": "Old", "n": 1}
    assert closed["data"] == "<1 bytes>"


async def test_what_is_no_map_is_shown_by_its_size():
    (line,) = await lines(stored("RunPaused", b"\xc1\xc1"))
    assert (line["type"], line["undecodable"]) == ("RunPaused", "<2 bytes>")


def test_decoding_is_bounded():
    assert plain_map(msgpack.packb({"a": 1})) == {"a": 1}
    bombs = [b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\x81" * 5000, b"\x91" * 5000]
    assert [plain_map(bomb) for bomb in bombs] == [None] * 4
    assert plain_map(b"\x81\xa1a\xdd\x00\x20\x00\x00" + b"\xc0" * 0x200000) is None, "too many"


def test_foreign_values_are_still_shown():
    data = msgpack.packb({"t": msgpack.Timestamp(1, 0), "x": msgpack.ExtType(5, b"y")})
    fields = plain_map(data)
    assert fields is not None and set(fields) == {"t", "x"}
    assert plain_map(b"\x81\xa1a\xa2\xff\xfe") == {"a": "��"}


async def test_hostile_events_are_shown_within_bounds():
    deep = b"\x81\xa1a" + b"\x91" * 900 + b"\xc0"
    list_as_key = b"\x81\x91\x01\x01"
    many_maps = b"\x81\xa1a\xdd\x00\x0f\xff\xff" + b"\x80" * 0xFFFFF
    for data in (deep, list_as_key):
        alone, letter = await lines(stored("Evil", data), rejected(data))
        assert alone["sequence"] == letter["sequence"] == 7
        assert len(json.dumps(alone)) < 1000
    assert plain_map(many_maps) is None
    assert plain_map(list_as_key) is None


async def test_a_field_does_not_hide_where_an_event_stands():
    [line] = await lines(stored("Evil", msgpack.packb({"stream": "weights", "sequence": 1})))
    assert line == {"stream": "control", "sequence": 7}
