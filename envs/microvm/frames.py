"""Frames of a guest's line, read from hostile bytes: every one typed, asked for, and bounded.

A frame is a reply to a request that was sent, at most as long as that request allows; or it belongs
to none (`id` 0) and is short: the hello, a confirmation of bytes that were not confirmed yet, a
piece of a stream. Anything else is a `GuestLie`, and ends that machine alone. What is held of a
frame is some five times its bytes at most.
"""

import struct
from collections.abc import Iterator

import msgspec

from penstock.envs.microvm.protocol import (
    OUTPUT_BYTES_MAX,
    PIECE_BYTES_MAX,
    REPLY_BYTES_MAX,
    GuestReply,
    GuestRequest,
)
from penstock.envs.sandbox import SandboxDied

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
