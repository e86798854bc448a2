"""The host's end of one guest's line: many requests at once, credits, freezing and thawing.

The guest's serial line holds 4 KiB and throttles near that, so no more than `WINDOW_BYTES` travel
beyond what the guest's last `credit` confirms; frames may be larger, as the guest consumes them
as they arrive. Everything from the guest is hostile input (`frames.py`): a lie ends the connection.

Frames of a guest's line, read from hostile bytes: every one typed, asked for, and bounded.

A frame is a reply to a request that was sent, at most as long as that request allows; or it belongs
to none (`id` 0) and is short: the hello, a confirmation of bytes that were not confirmed yet, a
piece of a stream. Anything else is a `GuestLie`, and ends that machine alone. What is held of a
frame is some five times its bytes at most.
"""

import asyncio
import struct
import time
from collections.abc import Callable, Iterator
from typing import cast

import msgspec

from penstock.envs.microvm.protocol import (
    OUTPUT_BYTES_MAX,
    PIECE_BYTES_MAX,
    REPLY_BYTES_MAX,
    REQUEST_BYTES_MAX,
    REQUESTS_MAX,
    VERSION,
    WINDOW_BYTES,
    GuestIdentity,
    GuestReply,
    GuestRequest,
    LineState,
    PieceHandler,
)
from penstock.envs.sandbox import (
    SandboxDied,
    SandboxError,
    SandboxFileError,
    SandboxRequestError,
    SandboxTimeout,
)

HEAD_BYTES = 512
"""Of a reply besides its content."""
LIST_BYTES_MAX = (1 << 20) + 8192
ERROR_BYTES = 8192
"""An error names a path, which has up to 4 KiB."""
LATE_REPLIES_MAX = 4096
"""Requests given up whose replies may still come; more than these end the machine, too."""
_LENGTH = struct.Struct("<I")
_DECODER = msgspec.msgpack.Decoder(GuestReply)


class GuestLie(SandboxDied):
    """The guest broke the protocol: it is not our agent any more. Its machine is ended."""


def reply_bytes_max(request: GuestRequest) -> int:
    """Return the length of the longest honest reply to a request."""
    output = 2 * min(request.bytes_max, OUTPUT_BYTES_MAX)
    content = {
        "exec": output,
        "verify": output,
        "read": request.bytes_max,
        "list": LIST_BYTES_MAX,
    }.get(request.op, 0)
    return max(ERROR_BYTES, content + HEAD_BYTES)


class ReplyBounds:
    """Which replies may come, and how long they may be.

    Args:
        next_id: Of the first request; a copied guest may still answer the original's, once each.

    """

    def __init__(self, next_id: int) -> None:
        self._bounds: dict[int, int] = {}
        self._originals = next_id
        self._num_originals_max = LATE_REPLIES_MAX if next_id > 1 else 0
        self._answered: set[int] = set()

    def expect(self, request: GuestRequest) -> None:
        """Allow the reply to a request; raises GuestLie if too many were never answered."""
        if len(self._bounds) >= LATE_REPLIES_MAX:
            raise GuestLie(f"the guest left {len(self._bounds)} requests without an answer")
        self._bounds[request.id] = reply_bytes_max(request)

    @property
    def longest(self) -> int:
        """Bytes of the longest frame that may come now."""
        originals = REPLY_BYTES_MAX if self._num_originals_max else 0
        return max(PIECE_BYTES_MAX + HEAD_BYTES, originals, *self._bounds.values())

    def take(self, reply_id: int, num_bytes: int) -> None:
        """Check a reply; there is one to each request. Raises GuestLie."""
        bound = self._bounds.pop(reply_id, None)
        if bound is None and 0 < reply_id < self._originals and reply_id not in self._answered:
            self._answered.add(reply_id)
            bound = REPLY_BYTES_MAX if len(self._answered) <= self._num_originals_max else None
        if bound is None:
            raise GuestLie(f"the guest answered request {reply_id}, which nobody sent")
        if num_bytes > bound:
            raise GuestLie(f"the guest answered with {num_bytes} bytes, at most {bound} were asked")


class FrameReader:
    """Splits what comes into frames.

    Args:
        bounds: What may come.

    """

    def __init__(self, bounds: ReplyBounds) -> None:
        self._bounds = bounds
        self._inbox = bytearray()
        self._is_greeted = False

    def feed(self, data: bytes) -> Iterator[GuestReply]:
        """Yield the complete frames.

        Raises:
            GuestLie: A frame is too long, malformed, or was not asked for.

        """
        self._inbox += data
        start = 0
        while len(self._inbox) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._inbox, start)
            if length > self._bounds.longest:
                longest = self._bounds.longest
                raise GuestLie(f"the guest announced a frame of {length} bytes, over {longest}")
            end = start + _LENGTH.size + length
            if len(self._inbox) < end:
                break
            with memoryview(self._inbox) as inbox:
                reply = _decoded(inbox[start + _LENGTH.size : end])
            self._check(reply, length)
            yield reply
            start = end
        del self._inbox[:start]

    def _check(self, reply: GuestReply, num_bytes: int) -> None:
        if reply.id != 0:
            return self._bounds.take(reply.id, num_bytes)
        if num_bytes > PIECE_BYTES_MAX + HEAD_BYTES:
            raise GuestLie(f"the guest sent {num_bytes} bytes that nobody asked for")
        if reply.hello and self._is_greeted:
            raise GuestLie("the guest said hello twice")
        self._is_greeted = self._is_greeted or bool(reply.hello)
        return None


def _decoded(frame: memoryview) -> GuestReply:
    try:
        return _DECODER.decode(frame)
    except (
        ValueError,
        RecursionError,
    ) as error:  # DecodeError and UnicodeDecodeError are the first
        raise GuestLie(f"the guest sent an invalid reply: {error or 'nested too deeply'}") from None


_FILE_ERRORS = {"not_found", "disk_full", "file_error"}


def _error(reply: GuestReply) -> Exception:
    text = reply.text.decode(errors="replace")
    if reply.error in _FILE_ERRORS:
        return SandboxFileError(text)
    return SandboxRequestError(f"{reply.error}: {text}")


class GuestConnection(asyncio.Protocol):
    """Requests to one guest, answered in any order.

    Args:
        describe_death: Called once when the connection ends; returns the machine's last words.
        state: Line state of a guest that was copied while it ran; by default a new guest's.

    """

    def __init__(self, describe_death: Callable[[], str], state: LineState | None = None) -> None:
        state = state or LineState()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_piece: PieceHandler | None = None
        self._describe_death = describe_death
        self._transport: asyncio.Transport | None = None
        self._next_id = state.next_id
        self.epoch = state.epoch
        """Which of its guest's copies this connection means."""
        self._waiting: dict[int, asyncio.Future[GuestReply]] = {}
        self._bounds = ReplyBounds(state.next_id)
        self._frames = FrameReader(self._bounds)
        self._outbox = bytearray()
        self._backlog: bytearray | None = None
        """Requests that wait for the thaw while the guest is frozen; else None."""
        self._sent = state.sent
        self._confirmed = state.sent
        self.died: SandboxDied | None = None
        """Why the connection ended; None while it lives."""
        self._encoder = msgspec.msgpack.Encoder()

    async def call(self, request: GuestRequest, *, timeout_s: float) -> GuestReply:
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

    def post(self, request: GuestRequest) -> None:
        """Send a request without waiting for its reply."""
        future = self._begin(request)
        reply_id = request.id
        future.add_done_callback(lambda _: self._waiting.pop(reply_id, None))

    def _begin(self, request: GuestRequest) -> asyncio.Future[GuestReply]:
        if self.died is not None:
            raise self.died
        if len(self._waiting) >= REQUESTS_MAX:
            raise SandboxRequestError(f"more than {REQUESTS_MAX} requests wait for one guest")
        request.v = VERSION
        request.epoch = self.epoch
        request.id = self._next_id
        self._next_id += 1
        body = self._encoder.encode(request)
        if len(body) > REQUEST_BYTES_MAX:
            raise SandboxRequestError(f"{request.op}: {len(body)} bytes exceed {REQUEST_BYTES_MAX}")
        self._expect(request)
        future = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        outbox = self._outbox if self._backlog is None or request.op == "thaw" else self._backlog
        outbox += struct.pack("<I", len(body)) + body
        self._pump()
        return future

    def _expect(self, request: GuestRequest) -> None:
        try:
            self._bounds.expect(request)
        except GuestLie as lie:
            self._fail(lie)
            raise

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

        Requests made meanwhile wait for the thaw.

        Returns:
            The state in which a copy's line starts.

        Raises:
            SandboxRequestError: It is frozen already.

        """
        if self._backlog is not None:
            raise SandboxRequestError("the machine is being copied already")
        frozen = self.call(GuestRequest(op="freeze"), timeout_s=timeout_s)
        asking = asyncio.ensure_future(frozen)
        await asyncio.sleep(0)  # its frame is in the outbox now: what comes next must wait
        self._backlog = bytearray()
        await asking
        return LineState(sent=self._sent, next_id=self._next_id, epoch=self.epoch)

    async def thaw(self, identity: GuestIdentity, *, timeout_s: float) -> None:
        """Thaw a frozen guest, as the machine it was or as a new one.

        Raises:
            GuestLie: It says that it is another copy.

        """
        self.epoch = identity.epoch
        request = GuestRequest(
            op="thaw",
            clock_ns=time.time_ns() if identity.entropy else 0,
            entropy=identity.entropy,
            hostname=identity.hostname.encode(),
            machine_id=identity.machine_id.encode(),
        )
        reply = await self.call(request, timeout_s=timeout_s)
        if reply.epoch != identity.epoch:
            lie = GuestLie(f"the guest is copy {reply.epoch}, expected {identity.epoch}")
            self._fail(lie)
            raise lie
        backlog, self._backlog = self._backlog, None
        self._outbox += backlog or b""
        self._pump()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self.died is not None:
            return
        try:
            for reply in self._frames.feed(data):
                self._take(reply)
        except GuestLie as lie:
            self._fail(lie)
        except SandboxError as lie:
            self._fail(GuestLie(str(lie)))

    def _take(self, reply: GuestReply) -> None:
        if not self._confirmed <= reply.credit <= self._sent:
            raise GuestLie(f"the guest confirmed {reply.credit} of {self._sent} bytes")
        says_something = reply.id or reply.hello or reply.stream
        if not says_something and reply.credit == self._confirmed:
            raise GuestLie("the guest sent a frame that says nothing")
        self._confirmed = reply.credit
        if reply.hello and not self.ready.done():
            self.ready.set_result(None)
        if reply.stream:
            if self.on_piece is None:
                raise GuestLie("the guest sent a piece of a stream that was not opened")
            self.on_piece(reply.stream, reply.data)
        waiting = self._waiting.get(reply.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)
        self._pump()

    def _fail(self, lie: GuestLie) -> None:
        self._die(lie)
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._die(SandboxDied(self._describe_death()))
        if not self.lost.done():
            self.lost.set_result(None)

    def _die(self, death: SandboxDied) -> None:
        if self.died is not None:
            return
        self.died = death
        for future in (self.ready, *self._waiting.values()):
            if not future.done():
                future.set_exception(death)
                future.exception()  # seen: a waiter may have gone already

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()
