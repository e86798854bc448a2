"""The host's side of the guest protocol against a guest that lies."""

import asyncio
import socket
import struct

import msgspec
import pytest

from penstock.envs.microvm.connection import GuestConnection
from penstock.envs.microvm.protocol import (
    REQUESTS_MAX,
    WINDOW_BYTES,
    GuestIdentity,
    GuestRequest,
    LineState,
)
from penstock.envs.sandbox import SandboxDied, SandboxRequestError, SandboxTimeout


class Guest:
    """The other end of the socket, driven by hand."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer
        self.taken = 0

    def say(self, **fields):
        self.send(msgspec.msgpack.encode({"v": 1, "credit": self.taken, "id": 0} | fields))

    def send(self, body):
        self.writer.write(struct.pack("<I", len(body)) + body)

    async def take(self, n):
        self.taken += n
        return await self.reader.readexactly(n)

    async def request(self):
        (length,) = struct.unpack("<I", await self.take(4))
        return msgspec.msgpack.decode(await self.take(length))


@pytest.fixture
async def ends():
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: GuestConnection(lambda: "gone"), sock=ours)
    reader, writer = await asyncio.open_connection(sock=theirs)
    yield connection, Guest(reader, writer)
    connection.abort()
    writer.close()
    await connection.lost


def call(connection, timeout_s=5.0, **fields):
    return asyncio.create_task(connection.call(GuestRequest(**fields), timeout_s=timeout_s))


async def test_replies_find_their_requests_in_any_order(ends):
    connection, guest = ends
    calls = [call(connection, op="read", path=f"/{i}") for i in range(3)]
    requests = [await guest.request() for _ in range(3)]
    for request in reversed(requests):
        guest.say(id=request["id"], data=request["path"].encode())
    assert [(await c).data for c in calls] == [b"/0", b"/1", b"/2"]


async def test_no_more_than_the_window_is_unconfirmed(ends):
    connection, guest = ends
    pending = call(connection, op="exec", argv=["x" * (3 * WINDOW_BYTES)])
    await guest.take(WINDOW_BYTES)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await guest.reader.readexactly(1)
    guest.say()  # confirms what was taken
    await guest.take(WINDOW_BYTES)
    pending.cancel()


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"\xc1", "invalid reply"),
        (msgspec.msgpack.encode({"v": 1}), "invalid reply"),
        (msgspec.msgpack.encode({"v": 1, "id": 1, "credit": 10**9}), "confirmed"),
        (msgspec.msgpack.encode({"v": 1, "id": 1, "credit": 0, "stdout": 3}), "invalid reply"),
        (b"", "invalid reply"),
    ],
)
async def test_nonsense_ends_the_connection(ends, frame, reason):
    connection, guest = ends
    pending = call(connection, op="ping")
    await guest.request()
    guest.send(frame)
    with pytest.raises(SandboxDied, match=reason):
        await pending
    with pytest.raises(SandboxDied, match=reason):
        await connection.call(GuestRequest(op="ping"), timeout_s=1.0)


async def test_an_endless_frame_ends_the_connection(ends):
    connection, guest = ends
    guest.writer.write(struct.pack("<I", 1 << 30))
    with pytest.raises(SandboxDied, match="1073741824 bytes"):
        await connection.ready


async def test_a_guest_that_goes_away_fails_all_requests(ends):
    connection, guest = ends
    calls = [call(connection, op="ping") for _ in range(3)]
    await guest.request()
    guest.writer.close()
    for pending in calls:
        with pytest.raises(SandboxDied, match="gone"):
            await pending


async def test_silence_is_a_timeout_and_a_late_reply_is_dropped(ends):
    connection, guest = ends
    with pytest.raises(SandboxTimeout, match="'ping' within"):
        await connection.call(GuestRequest(op="ping"), timeout_s=0.01)
    late = await guest.request()
    guest.say(id=late["id"])
    pending = call(connection, op="ping")
    guest.say(id=(await guest.request())["id"])
    await pending


async def test_too_large_a_request_is_refused_before_it_is_sent(ends):
    connection, _ = ends
    with pytest.raises(SandboxRequestError, match="exceed"):
        await connection.call(GuestRequest(op="exec", argv=["x" * (1 << 20)]), timeout_s=1.0)


async def test_what_is_posted_leaves_nothing_behind(ends):
    connection, guest = ends
    for _ in range(3 * REQUESTS_MAX):
        connection.post(GuestRequest(op="cancel", target=1))
        guest.say(id=(await guest.request())["id"])
        await asyncio.sleep(0)
    pending = call(connection, op="ping")
    guest.say(id=(await guest.request())["id"])
    await pending


async def test_while_the_guest_is_frozen_nothing_but_a_thaw_is_sent(ends):
    connection, guest = ends
    freezing = asyncio.create_task(connection.freeze(timeout_s=5.0))
    asked = await guest.request()
    pending = call(connection, op="ping")
    await asyncio.sleep(0.01)
    guest.say(id=asked["id"])
    line = await freezing
    assert line.sent == guest.taken  # all that was sent, the guest has
    with pytest.raises(SandboxRequestError, match="copied already"):
        await connection.freeze(timeout_s=1.0)
    thawing = asyncio.create_task(connection.thaw(GuestIdentity(epoch=line.epoch), timeout_s=5.0))
    thaw = await guest.request()
    assert thaw["op"] == "thaw"
    guest.say(id=thaw["id"])
    await thawing
    waited = await guest.request()
    assert waited["op"] == "ping"
    guest.say(id=waited["id"])
    await pending


async def test_a_copy_goes_on_with_the_line_where_it_stood():
    ours, theirs = socket.socketpair()
    state = LineState(sent=5000, next_id=9, epoch=2)
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: GuestConnection(lambda: "gone", state), sock=ours
    )
    guest = Guest(*await asyncio.open_connection(sock=theirs))
    guest.taken = 5000
    thawing = asyncio.create_task(connection.thaw(GuestIdentity.new(3), timeout_s=5.0))
    thaw = await guest.request()
    assert (thaw["id"], thaw["epoch"], len(thaw["entropy"])) == (9, 3, 32)
    guest.say(id=9, epoch=3)
    await thawing
    pending = call(connection, op="ping")
    ping = await guest.request()
    assert ping["epoch"] == 3
    guest.say(id=ping["id"])
    await pending
    connection.abort()
    guest.writer.close()
    await connection.lost
