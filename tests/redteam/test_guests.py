"""A guest whose agent lies: each lie ends its own machine, typed, and costs the host little."""

import asyncio
import socket
import struct
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.envs.egress.streams import GuestStreams, StreamProtocolError
from penstock.envs.microvm.connection import (
    FrameReader,
    GuestConnection,
    GuestProtocolError,
    ReplyBounds,
)
from penstock.envs.microvm.protocol import GuestIdentity, GuestRequest, LineState
from penstock.envs.sandbox import SandboxDied

MEMORY_FACTOR = 8


def frame(**fields) -> bytes:
    body = msgspec.msgpack.encode({"v": 1, "credit": 0, "id": 0} | fields)
    return struct.pack("<I", len(body)) + body


def read_frames(data: bytes, next_id: int = 1) -> list:
    """Return the frames of what a guest sent; above 1 it is a copy."""
    return list(FrameReader(ReplyBounds(next_id)).feed(data))


class Line:
    """A connection, fed by hand."""

    def __init__(self, connection):
        self.connection = connection

    def request(self, **fields) -> asyncio.Task:
        return asyncio.create_task(self.connection.call(GuestRequest(**fields), timeout_s=5.0))

    def say(self, data: bytes) -> None:
        self.connection.data_received(data)


@pytest.fixture
async def line():
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: GuestConnection(lambda: "gone"), sock=ours)
    yield Line(connection)
    connection.abort()
    theirs.close()
    await connection.lost


def check_lie(line, words: str) -> None:
    assert isinstance(line.connection.died, GuestProtocolError)
    assert words in str(line.connection.died)


async def test_a_frame_of_4_mib_that_nobody_asked_for_is_refused_when_it_is_announced(line):
    line.say(struct.pack("<I", 4 << 20))
    check_lie(line, "announced a frame of 4194304 bytes")


async def test_a_flood_of_replies_to_nothing_ends_with_the_first(line):
    line.say(frame(id=7, stdout=b"x" * 1000) * 100)
    check_lie(line, "answered request 7, which nobody sent")


async def test_a_second_reply_to_one_request_is_a_lie(line):
    asked = line.request(op="ping")
    await asyncio.sleep(0)
    line.say(frame(id=1))
    await asked
    line.say(frame(id=1))
    check_lie(line, "answered request 1, which nobody sent")


async def test_more_output_than_was_asked_for_is_a_lie(line):
    asked = line.request(op="exec", argv=["true"], bytes_max=1000)
    await asyncio.sleep(0)
    line.say(frame(id=1, stdout=b"x" * 9000))
    with pytest.raises(SandboxDied, match="expected at most 8192"):
        await asked


async def test_a_long_reply_to_a_short_request_hides_behind_no_other_request(line):
    ping = line.request(op="ping")
    line.request(op="list", path="/")
    await asyncio.sleep(0)
    line.say(frame(id=1, data=b"x" * 100_000))
    with pytest.raises(GuestProtocolError, match="expected at most 8192"):
        await ping


async def test_frames_that_say_nothing_are_no_way_to_keep_a_host_busy(line):
    line.say(frame(hello=1))
    line.say(frame() * 10_000)
    check_lie(line, "empty frame")


async def test_hello_is_said_once(line):
    line.say(frame(hello=1))
    line.say(frame(hello=1))
    check_lie(line, "hello twice")


async def test_nesting_without_end_is_an_invalid_reply(line):
    body = b"\x84\xa1v\x01\xa2id\x00\xa6credit\x00\xa5files" + b"\x91" * 15_000
    line.say(struct.pack("<I", len(body)) + body)
    check_lie(line, "invalid reply")


@pytest.mark.parametrize(
    "fields",
    [{"id": "1"}, {"id": -1}, {"error": b"\xff"}, {"exit_code": 1 << 63}, {"files": [[b"a", "x"]]},
     {"unknown": [[[[1]]]]}, {"stream": 3.5}, {"v": None}],
)  # fmt: skip
async def test_wrong_types_and_unknown_fields_are_invalid(line, fields):
    line.say(frame(**fields))
    check_lie(line, "invalid reply")


async def test_text_that_is_not_utf_8_is_an_invalid_reply(line):
    body = b"\x84\xa1v\x01\xa2id\x00\xa6credit\x00\xa5error\xa1\xff"
    line.say(struct.pack("<I", len(body)) + body)
    check_lie(line, "invalid reply")


async def test_a_copys_guest_answers_what_the_original_was_asked_once_each():
    reading = GuestConnection(lambda: "gone", LineState(next_id=3))
    reading.data_received(frame(id=2, stdout=b"late"))
    assert reading.died is None
    reading.data_received(frame(id=2))
    assert isinstance(reading.died, GuestProtocolError)


async def test_a_guest_that_thaws_as_another_copy_is_a_lie(line):
    thawing = asyncio.create_task(line.connection.thaw(GuestIdentity.new(7), timeout_s=5.0))
    await asyncio.sleep(0)
    line.say(frame(id=1, epoch=6))
    with pytest.raises(GuestProtocolError):
        await thawing
    check_lie(line, "copy 6, expected 7")


async def test_streams_that_have_ended_are_no_way_to_keep_a_host_busy():
    class Deaf:
        on_piece = None

        async def call(self, request, *, timeout_s):
            pass

        def post(self, request):
            pass

    async def hang_up(stream):
        pass

    streams = GuestStreams(Deaf(), hang_up)
    streams.take(1, b"x")
    await asyncio.sleep(0.01)
    with pytest.raises(StreamProtocolError, match="streams that have ended"):
        for _ in range(10_000):
            streams.take(1, b"x")
    await streams.close()


fields = st.dictionaries(
    st.sampled_from(["v", "id", "credit", "hello", "error", "text", "files", "stream", "data"]),
    st.integers(-1, 1 << 40) | st.binary(max_size=40) | st.lists(st.binary(max_size=4)),
)


@given(st.lists(st.binary(max_size=60) | fields.map(lambda each: frame(**each)), max_size=8))
def test_any_bytes_are_frames_or_a_typed_lie(pieces):
    try:
        read_frames(b"".join(pieces))
    except GuestProtocolError as lie:
        assert str(lie)


@pytest.mark.parametrize("entry", [[b"", "file"], [b"a.py", "file", 1234, 0o644]])
def test_a_listing_takes_no_more_than_eight_times_its_bytes(entry):
    data = frame(id=1, files=[entry] * 100_000)
    tracemalloc.start()
    try:
        frames = read_frames(data, next_id=2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(frames[0].files) == 100_000
    assert peak < MEMORY_FACTOR * len(data)
