"""Host side of the connections that guest programs open to the agent's proxy port.

The agent sends the next piece of a stream once the host has acknowledged the last one, and answers
a piece sent to it once the program has read it. So the host buffers at most one piece per stream
and direction.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from penstock.envs.microvm.protocol import PIECE_BYTES_MAX, GuestRequest, PieceHandler
from penstock.envs.sandbox import SandboxError

log = logging.getLogger(__name__)

SEND_S_MAX = 60.0
STREAMS_MAX = 64
"""Maximum open streams; more than the agent's 16, since the host learns of ends later."""
LATE_PIECES_MAX = 2
"""Pieces that may arrive after a stream has ended: one in flight, and the empty last one."""
ENDED_MAX = 4096
"""Ended stream ids to remember individually while a stream with a lower id is still open."""


class GuestLine(Protocol):
    """The part of a connection to a guest agent that streams need."""

    on_piece: PieceHandler | None
    """Handler of incoming stream pieces."""

    async def call(self, request: GuestRequest, *, timeout_s: float) -> object:
        """Send a request and return the answer."""
        ...

    def post(self, request: GuestRequest) -> None:
        """Send a request without waiting for the answer."""
        ...


class StreamProtocolError(SandboxError, ValueError):
    """The guest violated the stream protocol, so it no longer runs our agent."""


class GuestStream:
    """Connection of a program in the guest."""

    def __init__(self, line: GuestLine, stream_id: int) -> None:
        self._line, self._id = line, stream_id
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
        self._is_ended = False

    def put(self, piece: bytes) -> None:
        """Queue a piece from the agent.

        Raises:
            StreamProtocolError: The piece is too long or was not requested.

        """
        if len(piece) > PIECE_BYTES_MAX or self._is_ended or self._pieces.full():
            raise StreamProtocolError(f"the guest sent {len(piece)} unrequested bytes on a stream")
        self._is_ended = not piece
        self._pieces.put_nowait(piece)

    async def receive(self) -> bytes:
        """Return the next piece; empty at and after the end of the stream."""
        if self._is_ended and self._pieces.empty():
            return b""
        piece = await self._pieces.get()
        if piece:
            self._line.post(GuestRequest(op="took", target=self._id))
        return piece

    async def send(self, data: bytes) -> None:
        """Send bytes and return when the program has read them.

        Raises:
            SandboxError: The program hung up, or stopped reading.

        """
        for start in range(0, len(data), PIECE_BYTES_MAX):
            piece = data[start : start + PIECE_BYTES_MAX]
            request = GuestRequest(op="send", target=self._id, data=piece)
            await self._line.call(request, timeout_s=SEND_S_MAX)

    async def close(self) -> None:
        """End the connection, which may be gone already."""
        # A piece without data is the end of a stream.
        await self._line.call(GuestRequest(op="send", target=self._id), timeout_s=SEND_S_MAX)


class GuestStreams:
    """Open streams of one guest, each served by its own task.

    Args:
        line: Connection to the guest agent.
        serve: Coroutine function that serves one stream until its end.

    """

    def __init__(self, line: GuestLine, serve: Callable[[GuestStream], Awaitable[None]]) -> None:
        self._line, self._serve = line, serve
        self._streams: dict[int, GuestStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Ids only grow, so one bound and a few exceptions tell ended streams from new ones without
        # remembering every id. Exceptions exist since streams do not write in the order they open.
        self._all_ended_to = 0
        self._ended: set[int] = set()
        self._num_ended = self._num_late = 0

    def take(self, stream_id: int, piece: bytes) -> None:
        """Queue a piece; the first piece with a new id begins a stream.

        Raises:
            StreamProtocolError: As `GuestStream.put`, or too many streams are open.

        """
        stream = self._streams.get(stream_id)
        if stream is None:
            if stream_id <= self._all_ended_to or stream_id in self._ended:
                return self._drop_late()
            stream = self._begin(stream_id)
        return stream.put(piece)

    def _drop_late(self) -> None:
        """Drop a piece that was sent before the agent learned that its stream had ended."""
        self._num_late += 1
        # Bounded in total: otherwise a hostile guest could keep the host busy with late pieces.
        if self._num_late > LATE_PIECES_MAX * (STREAMS_MAX + self._num_ended):
            raise StreamProtocolError("the guest keeps writing to streams that have ended")

    def _begin(self, stream_id: int) -> GuestStream:
        if len(self._streams) >= STREAMS_MAX:
            raise StreamProtocolError(f"the guest opened more than {STREAMS_MAX} streams")
        stream = self._streams[stream_id] = GuestStream(self._line, stream_id)
        task = asyncio.get_running_loop().create_task(self._run(stream_id, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _run(self, stream_id: int, stream: GuestStream) -> None:
        try:
            await self._serve(stream)
            await stream.close()
        except SandboxError as error:
            # The program or its machine is gone; what it tried is on record.
            log.debug("stream %d ended: %s", stream_id, error)
        finally:
            del self._streams[stream_id]
            self._end(stream_id)

    def _end(self, stream_id: int) -> None:
        self._num_ended += 1
        self._ended.add(stream_id)
        # The ids of a copied guest continue those of its original, so the ids below may never come;
        # waiting for them would let the set grow without bound.
        if len(self._ended) > ENDED_MAX:
            self._all_ended_to = min(self._ended) - 1
        while self._all_ended_to + 1 in self._ended:
            self._all_ended_to += 1
            self._ended.remove(self._all_ended_to)

    async def close(self) -> None:
        """End all streams."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
