"""Host end of a guest's line: concurrent requests, flow control, freezing and thawing.

The guest's serial line buffers 4 KiB and throttles near that, so the host never has more than
`WINDOW_BYTES` in flight beyond the last `credit` of the guest. Frames may be larger, because the
guest consumes them as they arrive.

Everything that comes from the guest is hostile input. A frame is either the reply to an open
request, no longer than that request allows, or an unsolicited one (`id` 0), which is short: the
hello, a credit for bytes not confirmed yet, or a piece of a stream. Any other frame raises
`GuestProtocolError` and ends that machine only. Decoding a frame takes at most about five times its
bytes.
"""

import asyncio
import logging
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

log = logging.getLogger(__name__)

HEAD_BYTES = 512
"""Maximum bytes of a reply in addition to its content."""
LIST_BYTES_MAX = (1 << 20) + 8192
"""Maximum bytes of a listing: the agent stops after the item that exceeds 1 MiB."""
ERROR_BYTES = 8192
"""Maximum bytes of an error reply, which may name a path of up to 4 KiB."""
LATE_REPLIES_MAX = 4096
"""Maximum requests without a reply, abandoned ones included; more end the machine."""
_LENGTH = struct.Struct("<I")
_DECODER = msgspec.msgpack.Decoder(GuestReply)


class GuestProtocolError(SandboxDied):
    """The guest violated the protocol, so it no longer runs our agent; its machine is ended."""


def reply_bytes_max(request: GuestRequest) -> int:
    """Return the length in bytes of the longest valid reply to a request."""
    output = 2 * min(request.bytes_max, OUTPUT_BYTES_MAX)
    content = {
        "exec": output,
        "verify": output,
        "read": request.bytes_max,
        "list": LIST_BYTES_MAX,
    }.get(request.op, 0)
    return max(ERROR_BYTES, content + HEAD_BYTES)


class ReplyBounds:
    """Replies that the guest may send, and their maximum lengths.

    Args:
        next_id: Id of the first request. A copied guest may still answer requests of its original,
            which have lower ids, once each.

    """

    def __init__(self, next_id: int) -> None:
        self._bounds: dict[int, int] = {}
        self._originals = next_id
        self._num_originals_max = LATE_REPLIES_MAX if next_id > 1 else 0
        self._answered: set[int] = set()

    def expect(self, request: GuestRequest) -> None:
        """Allow the reply to a request; raise GuestLie if too many requests lack a reply."""
        if len(self._bounds) >= LATE_REPLIES_MAX:
            raise GuestProtocolError(
                f"the guest left {len(self._bounds)} requests without an answer"
            )
        self._bounds[request.id] = reply_bytes_max(request)

    @property
    def longest(self) -> int:
        """Length in bytes of the longest frame that is valid now."""
        originals = REPLY_BYTES_MAX if self._num_originals_max else 0
        return max(PIECE_BYTES_MAX + HEAD_BYTES, originals, *self._bounds.values())

    def take(self, reply_id: int, num_bytes: int) -> None:
        """Check a reply; raise GuestLie if it was not requested, is a repeat, or is too long."""
        bound = self._bounds.pop(reply_id, None)
        # The lengths that the original allowed are unknown here, so the general maximum applies.
        if bound is None and 0 < reply_id < self._originals and reply_id not in self._answered:
            self._answered.add(reply_id)
            bound = REPLY_BYTES_MAX if len(self._answered) <= self._num_originals_max else None
        if bound is None:
            raise GuestProtocolError(f"the guest answered request {reply_id}, which nobody sent")
        if num_bytes > bound:
            raise GuestProtocolError(
                f"the guest answered with {num_bytes} bytes, expected at most {bound}"
            )


class FrameReader:
    """Splits incoming bytes into frames and checks them.

    Args:
        bounds: Replies that are valid now.

    """

    def __init__(self, bounds: ReplyBounds) -> None:
        self._bounds = bounds
        self._inbox = bytearray()
        self._is_greeted = False

    def feed(self, data: bytes) -> Iterator[GuestReply]:
        """Yield the frames that are complete.

        Raises:
            GuestLie: A frame is too long, malformed, or was not requested.

        """
        self._inbox += data
        start = 0
        while len(self._inbox) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._inbox, start)
            # Checked before the frame arrives: the host must not buffer what it would refuse.
            if length > self._bounds.longest:
                longest = self._bounds.longest
                raise GuestProtocolError(
                    f"the guest announced a frame of {length} bytes, over {longest}"
                )
            end = start + _LENGTH.size + length
            if len(self._inbox) < end:
                break
            # Released before the bytes are deleted below: a bytearray with views cannot shrink.
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
            raise GuestProtocolError(f"the guest sent an unsolicited frame of {num_bytes} bytes")
        if reply.hello and self._is_greeted:
            raise GuestProtocolError("the guest said hello twice")
        self._is_greeted = self._is_greeted or bool(reply.hello)
        return None


def _decoded(frame: memoryview) -> GuestReply:
    try:
        return _DECODER.decode(frame)
    # ValueError covers DecodeError and UnicodeDecodeError.
    except (ValueError, RecursionError) as error:
        raise GuestProtocolError(
            f"the guest sent an invalid reply: {error or 'nested too deeply'}"
        ) from None


_FILE_ERRORS = {"not_found", "disk_full", "file_error"}


def _error(reply: GuestReply) -> Exception:
    text = reply.text.decode(errors="replace")
    if reply.error in _FILE_ERRORS:
        return SandboxFileError(text)
    return SandboxRequestError(f"{reply.error}: {text}")


class GuestConnection(asyncio.Protocol):
    """Connection to one guest agent, whose replies may come in any order.

    Args:
        describe_death: Called when the connection ends; returns the last output of the machine.
        state: Line state of a guest that was copied while it ran; defaults to that of a new guest.

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
        """Number of the copy that requests are meant for."""
        self._waiting: dict[int, asyncio.Future[GuestReply]] = {}
        self._bounds = ReplyBounds(state.next_id)
        self._frames = FrameReader(self._bounds)
        self._outbox = bytearray()
        self._backlog: bytearray | None = None
        """Encoded requests that wait for the thaw of a frozen guest; None if it is not frozen."""
        self._sent = state.sent
        self._confirmed = state.sent
        self.died: SandboxDied | None = None
        """Error with which the connection ended; None while it is open."""
        self._encoder = msgspec.msgpack.Encoder()

    async def call(self, request: GuestRequest, *, timeout_s: float) -> GuestReply:
        """Send a request and return its reply.

        Raises:
            SandboxDied: The connection ended before the reply.
            SandboxTimeout: No reply within `timeout_s`.
            SandboxFileError, SandboxRequestError: The guest refused the request.

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
            raise SandboxRequestError(f"more than {REQUESTS_MAX} requests are open to one guest")
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
        # While frozen the guest refuses everything but the thaw, so the rest waits for it.
        outbox = self._outbox if self._backlog is None or request.op == "thaw" else self._backlog
        outbox += struct.pack("<I", len(body)) + body
        self._pump()
        return future

    def _expect(self, request: GuestRequest) -> None:
        try:
            self._bounds.expect(request)
        except GuestProtocolError as lie:
            self._fail(lie)
            raise

    def _pump(self) -> None:
        """Write as much of the outbox as the guest has credit for."""
        room = WINDOW_BYTES - (self._sent - self._confirmed)
        if room <= 0 or not self._outbox or self._transport is None:
            return
        chunk = bytes(self._outbox[:room])
        del self._outbox[:room]
        self._sent += len(chunk)
        self._transport.write(chunk)

    async def freeze(self, *, timeout_s: float) -> LineState:
        """Silence the guest agent so that its machine can be copied; programs keep running.

        Requests made meanwhile wait for the thaw.

        Returns:
            The line state with which the connection to a copy starts.

        Raises:
            SandboxRequestError: The guest is frozen already.

        """
        if self._backlog is not None:
            raise SandboxRequestError("the machine is being copied already")
        call = self.call(GuestRequest(op="freeze"), timeout_s=timeout_s)
        freezing = asyncio.ensure_future(call)
        # One turn of the loop puts the freeze into the outbox; every later request goes to the
        # backlog, or the guest would receive it frozen and refuse it.
        await asyncio.sleep(0)
        self._backlog = bytearray()
        await freezing
        return LineState(sent=self._sent, next_id=self._next_id, epoch=self.epoch)

    async def thaw(self, identity: GuestIdentity, *, timeout_s: float) -> None:
        """Thaw a frozen guest, either as the same machine or as a new copy.

        Raises:
            GuestLie: The guest reports the epoch of another copy.

        """
        self.epoch = identity.epoch
        request = GuestRequest(
            op="thaw",
            # The original kept its clock running; only a copy wakes up with an old time.
            clock_ns=time.time_ns() if identity.entropy else 0,
            entropy=identity.entropy,
            hostname=identity.hostname.encode(),
            machine_id=identity.machine_id.encode(),
        )
        reply = await self.call(request, timeout_s=timeout_s)
        if reply.epoch != identity.epoch:
            lie = GuestProtocolError(f"the guest is copy {reply.epoch}, expected {identity.epoch}")
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
        # After an invalid frame the transport may still deliver bytes that were in flight.
        if self.died is not None:
            return
        try:
            for reply in self._frames.feed(data):
                self._take(reply)
        except GuestProtocolError as lie:
            self._fail(lie)
        except SandboxError as error:
            self._fail(GuestProtocolError(str(error)))

    def _take(self, reply: GuestReply) -> None:
        if not self._confirmed <= reply.credit <= self._sent:
            raise GuestProtocolError(f"the guest confirmed {reply.credit} of {self._sent} bytes")
        has_content = reply.id or reply.hello or reply.stream
        # Frames without effect are refused, since a guest could send them without end.
        if not has_content and reply.credit == self._confirmed:
            raise GuestProtocolError("the guest sent an empty frame")
        self._confirmed = reply.credit
        if reply.hello and not self.ready.done():
            self.ready.set_result(None)
        if reply.stream:
            if self.on_piece is None:
                raise GuestProtocolError("the guest sent a piece of a stream that was not opened")
            self.on_piece(reply.stream, reply.data)
        waiting = self._waiting.get(reply.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)
        self._pump()

    def _fail(self, lie: GuestProtocolError) -> None:
        log.warning("guest violated the protocol, its machine ends: %s", lie)
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
                # Marks it as retrieved: asyncio complains if the waiter has gone already.
                future.exception()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()
