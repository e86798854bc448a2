"""The guest agent's protocol, host side: framed msgpack over one socket, credits, many requests.

A frame is u32 little-endian length + a msgpack map. The guest's serial line holds 4 KiB and
throttles near that, so no more than `WINDOW_BYTES` travel beyond what the guest's last `credit`
confirms; frames may be larger, as the guest consumes them while they come. Everything from the
guest is hostile input: lengths are bounded, and what does not decode ends the connection.
"""

import asyncio
import itertools
import struct
from collections.abc import Callable

import msgspec

from penstock.envs.sandbox import (
    SandboxDied,
    SandboxFileError,
    SandboxRequestError,
    SandboxTimeout,
)

VERSION = 1
WINDOW_BYTES = 3000
REQUEST_BYTES_MAX = 1 << 20
REPLY_BYTES_MAX = 4 << 20
REQUESTS_MAX = 256

_FILE_ERRORS = {"not_found", "disk_full", "file_error"}


class FilePiece(msgspec.Struct, array_like=True, frozen=True):
    """A part of a file to write: the first creates or empties it, the next ones append."""

    path: str
    mode: int
    append: bool
    data: bytes


class Request(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Host -> guest agent (`guest/request.h` has the same fields)."""

    v: int = 0
    id: int = 0
    op: str
    op_key: str = ""
    deadline_ms: int = 0
    bytes_max: int = 0
    offset: int = 0
    target: int = 0
    path: str = ""
    argv: list[str] = []
    env: list[str] = []
    files: list[FilePiece] = []


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One item of a listing."""

    path: bytes
    kind: str
    size: int
    mode: int


class Reply(msgspec.Struct, kw_only=True):
    """Guest agent -> host; each operation fills its own fields."""

    v: int
    id: int
    credit: int
    hello: int = 0
    error: str = ""
    text: bytes = b""
    """Bytes, as a path in it need not be UTF-8."""
    exit_code: int = 0
    duration_ms: int = 0
    timed_out: bool = False
    truncated: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    size: int = 0
    data: bytes = b""
    written: int = 0
    files: list[Entry] = []


def _error(reply: Reply) -> Exception:
    text = reply.text.decode(errors="replace")
    if reply.error in _FILE_ERRORS:
        return SandboxFileError(text)
    return SandboxRequestError(f"{reply.error}: {text}")


class GuestConnection(asyncio.Protocol):
    """Requests to one guest, answered in any order.

    Args:
        describe_death: Called once when the connection ends; returns the machine's last words.

    """

    def __init__(self, describe_death: Callable[[], str]) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._describe_death = describe_death
        self._transport: asyncio.Transport | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._sent = 0
        self._confirmed = 0
        self._death: SandboxDied | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Reply)

    async def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Send a request and wait for its reply.

        Raises:
            SandboxDied: The connection ended before the reply.
            SandboxTimeout: No reply within `timeout_s`.
            SandboxFileError, SandboxRequestError: The guest refused.

        """
        future = self._begin(request)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await future
        except TimeoutError:
            raise SandboxTimeout(f"no answer to {request.op!r} within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(request.id, None)
        if reply.error:
            raise _error(reply)
        return reply

    def post(self, request: Request) -> None:
        """Send a request whose reply nobody waits for."""
        future = self._begin(request)
        reply_id = request.id
        future.add_done_callback(lambda _: self._waiting.pop(reply_id, None))

    def _begin(self, request: Request) -> asyncio.Future[Reply]:
        if self._death is not None:
            raise self._death
        if len(self._waiting) >= REQUESTS_MAX:
            raise SandboxRequestError(f"more than {REQUESTS_MAX} requests wait for one guest")
        request.v = VERSION
        request.id = next(self._ids)
        body = self._encoder.encode(request)
        if len(body) > REQUEST_BYTES_MAX:
            raise SandboxRequestError(f"{request.op}: {len(body)} bytes exceed {REQUEST_BYTES_MAX}")
        future = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        self._outbox += struct.pack("<I", len(body)) + body
        self._pump()
        return future

    def _pump(self) -> None:
        room = WINDOW_BYTES - (self._sent - self._confirmed)
        if room <= 0 or not self._outbox or self._transport is None:
            return
        chunk = bytes(self._outbox[:room])
        del self._outbox[:room]
        self._sent += len(chunk)
        self._transport.write(chunk)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._inbox += data
        start = 0
        while len(self._inbox) - start >= 4:
            (length,) = struct.unpack_from("<I", self._inbox, start)
            if length > REPLY_BYTES_MAX:
                return self._fail(f"the guest announced a frame of {length} bytes")
            end = start + 4 + length
            if len(self._inbox) < end:
                break
            self._take(bytes(memoryview(self._inbox)[start + 4 : end]))
            start = end
        del self._inbox[:start]

    def _take(self, frame: bytes) -> None:
        try:
            reply = self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return self._fail(f"the guest sent what is no reply: {error}")
        if not self._confirmed <= reply.credit <= self._sent:
            return self._fail(f"the guest confirmed {reply.credit} of {self._sent} bytes")
        self._confirmed = reply.credit
        if reply.hello and not self.ready.done():
            self.ready.set_result(None)
        waiting = self._waiting.get(reply.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)
        self._pump()

    def _fail(self, reason: str) -> None:
        self._die(SandboxDied(reason))
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._die(SandboxDied(self._describe_death()))
        if not self.lost.done():
            self.lost.set_result(None)

    def _die(self, death: SandboxDied) -> None:
        if self._death is not None:
            return
        self._death = death
        for future in (self.ready, *self._waiting.values()):
            if not future.done():
                future.set_exception(death)
                future.exception()  # seen: a waiter may have gone already

    @property
    def died(self) -> SandboxDied | None:
        """Why the connection ended, or None while it lives."""
        return self._death

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()
