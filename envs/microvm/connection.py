"""The host's end of one guest's line: many requests at once, credits, freezing and thawing.

The guest's serial line holds 4 KiB and throttles near that, so no more than `WINDOW_BYTES` travel
beyond what the guest's last `credit` confirms; frames may be larger, as the guest consumes them
as they arrive. Everything from the guest is hostile input (`frames.py`): a lie ends the connection.
"""

import asyncio
import struct
import time
from collections.abc import Callable
from typing import cast

import msgspec

from penstock.envs.microvm.frames import FrameReader, GuestLie, ReplyBounds
from penstock.envs.microvm.protocol import (
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
