"""The guest agent's protocol, host side: framed msgpack over one socket, credits, many requests.

A frame is u32 little-endian length + a msgpack map. The guest's serial line holds 4 KiB and
throttles near that, so no more than `WINDOW_BYTES` travel beyond what the guest's last `credit`
confirms; frames may be larger, as the guest consumes them while they come. Everything from the
guest is hostile input: lengths are bounded, and what does not decode ends the connection.
"""

import asyncio
import secrets
import struct
import time
from collections.abc import Callable
from typing import Self

import msgspec

from penstock.envs.sandbox import (
    SandboxDied,
    SandboxError,
    SandboxFileError,
    SandboxRequestError,
    SandboxTimeout,
)

VERSION = 1
WINDOW_BYTES = 3000
REQUEST_BYTES_MAX = 1 << 20
REPLY_BYTES_MAX = 4 << 20
REQUESTS_MAX = 256

PieceHandler = Callable[[int, bytes], None]
"""Takes a stream's id and the next bytes of it; raises `SandboxError` on what no agent sends."""
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
    epoch: int = 0
    clock_ns: int = 0
    entropy: bytes = b""
    hostname: bytes = b""
    machine_id: bytes = b""
    data: bytes = b""


class LineState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a quiet line stands, so that another connection can go on with a copy of the guest."""

    sent: int = 0
    """Bytes that the guest has taken in since it booted."""
    next_id: int = 1
    """Running commands answer to their old ids: new ones must not repeat these."""
    epoch: int = 0
    """Which of the copies is meant; the guest refuses requests for an earlier one."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What tells a copy from the machine it was copied from; empty fields leave things be."""

    epoch: int
    entropy: bytes = b""
    hostname: str = ""
    machine_id: str = ""

    @classmethod
    def new(cls, epoch: int, hostname: str = "vm") -> Self:
        """Return a fresh identity."""
        token = secrets.token_bytes(48)
        return cls(epoch=epoch, entropy=token[:32], hostname=hostname, machine_id=token[32:].hex())


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
    stream: int = 0
    """Sent unasked: `data` are the next bytes of this stream, and none are its end."""


def _error(reply: Reply) -> Exception:
    text = reply.text.decode(errors="replace")
    if reply.error in _FILE_ERRORS:
        return SandboxFileError(text)
    return SandboxRequestError(f"{reply.error}: {text}")


class GuestConnection(asyncio.Protocol):
    """Requests to one guest, answered in any order.

    Args:
        describe_death: Called once when the connection ends; returns the machine's last words.
        state: Of the line to a guest that was copied while it ran; by default a new guest's.

    """

    def __init__(self, describe_death: Callable[[], str], state: LineState | None = None) -> None:
        state = state or LineState()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_piece: PieceHandler | None = None
        self._describe_death = describe_death
        self._transport: asyncio.Transport | None = None
        self._next_id = state.next_id
        self._epoch = state.epoch
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._backlog: bytearray | None = None
        """Of requests that wait for the thaw, while the guest is frozen."""
        self._sent = state.sent
        self._confirmed = state.sent
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
        request.epoch = self._epoch
        request.id = self._next_id
        self._next_id += 1
        body = self._encoder.encode(request)
        if len(body) > REQUEST_BYTES_MAX:
            raise SandboxRequestError(f"{request.op}: {len(body)} bytes exceed {REQUEST_BYTES_MAX}")
        future = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        outbox = self._outbox if self._backlog is None or request.op == "thaw" else self._backlog
        outbox += struct.pack("<I", len(body)) + body
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

    async def freeze(self, *, timeout_s: float) -> LineState:
        """Silence the guest agent, so that its machine can be copied; programs run on.

        Requests that are made meanwhile wait for the thaw.

        Returns:
            The state in which a copy's line starts.

        Raises:
            SandboxRequestError: It is frozen already.

        """
        if self._backlog is not None:
            raise SandboxRequestError("the machine is being copied already")
        frozen = self.call(Request(op="freeze"), timeout_s=timeout_s)
        asking = asyncio.ensure_future(frozen)
        await asyncio.sleep(0)  # its frame is in the outbox now: what comes next must wait
        self._backlog = bytearray()
        await asking
        return LineState(sent=self._sent, next_id=self._next_id, epoch=self._epoch)

    async def thaw(self, identity: Identity, *, timeout_s: float) -> None:
        """Let a frozen guest go on, as the machine it was or as a new one."""
        self._epoch = identity.epoch
        request = Request(
            op="thaw",
            clock_ns=time.time_ns() if identity.entropy else 0,
            entropy=identity.entropy,
            hostname=identity.hostname.encode(),
            machine_id=identity.machine_id.encode(),
        )
        await self.call(request, timeout_s=timeout_s)
        backlog, self._backlog = self._backlog, None
        self._outbox += backlog or b""
        self._pump()

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
        if reply.stream:
            self._take_piece(reply)
        waiting = self._waiting.get(reply.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)
        self._pump()

    def _take_piece(self, reply: Reply) -> None:
        if self.on_piece is None:
            return self._fail("the guest sent a piece of a stream, unasked")
        try:
            self.on_piece(reply.stream, reply.data)
        except SandboxError as lie:
            self._fail(str(lie))

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
    def epoch(self) -> int:
        """Which of its guest's copies this connection means."""
        return self._epoch

    @property
    def died(self) -> SandboxDied | None:
        """Why the connection ended, or None while it lives."""
        return self._death

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()
