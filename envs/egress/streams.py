"""Connections of a guest's programs to the one port that its agent listens on, host side.

The agent sends the next piece of a stream when the last one was taken, and answers a piece sent to
it when the program has it: so at most one piece per stream and direction is held here.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from penstock.envs.microvm.protocol import PIECE_BYTES_MAX, GuestRequest, PieceHandler
from penstock.envs.sandbox import SandboxError

SEND_S_MAX = 60.0
STREAMS_MAX = 64
"""More than an agent opens at once, as ends are reported later than beginnings."""
LATE_PIECES_MAX = 2
"""Of a stream that has ended: the piece that was under way, and its end."""
ENDED_MAX = 4096
"""Streams that may end while an earlier one is silent; after these it counts as ended."""


class GuestLine(Protocol):
    """What is needed of a connection to a guest agent."""

    on_piece: PieceHandler | None
    """Takes the pieces of streams."""

    async def call(self, request: GuestRequest, *, timeout_s: float) -> object:
        """Send a request and wait for the answer."""
        ...

    def post(self, request: GuestRequest) -> None:
        """Send a request without waiting for the answer."""
        ...


class StreamLie(SandboxError, ValueError):
    """The guest agent broke the rules of its streams: it is not our agent."""


class GuestStream:
    """One connection of a program in the guest."""

    def __init__(self, line: GuestLine, stream_id: int) -> None:
        self._line, self._id = line, stream_id
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
        self._is_ended = False

    def put(self, piece: bytes) -> None:
        """Queue a piece from the agent.

        Raises:
            StreamLie: It is too long, or was not requested.

        """
        if len(piece) > PIECE_BYTES_MAX or self._is_ended or self._pieces.full():
            raise StreamLie(f"the guest sent {len(piece)} bytes on a stream, unasked")
        self._is_ended = not piece
        self._pieces.put_nowait(piece)

    async def receive(self) -> bytes:
        """Return the next piece; empty from the end on."""
        if self._is_ended and self._pieces.empty():
            return b""
        piece = await self._pieces.get()
        if piece:
            self._line.post(GuestRequest(op="took", target=self._id))
        return piece

    async def send(self, data: bytes) -> None:
        """Return when the program has taken some bytes.

        Raises:
            SandboxError: It hung up, or reads nothing.

        """
        for start in range(0, len(data), PIECE_BYTES_MAX):
            piece = data[start : start + PIECE_BYTES_MAX]
            request = GuestRequest(op="send", target=self._id, data=piece)
            await self._line.call(request, timeout_s=SEND_S_MAX)

    async def close(self) -> None:
        """End the connection; it may be gone already."""
        await self._line.call(GuestRequest(op="send", target=self._id), timeout_s=SEND_S_MAX)


class GuestStreams:
    """All streams of one guest, each served by its own task.

    Args:
        line: To the guest agent.
        serve: Answers one stream, until its end.

    """

    def __init__(self, line: GuestLine, serve: Callable[[GuestStream], Awaitable[None]]) -> None:
        self._line, self._serve = line, serve
        self._streams: dict[int, GuestStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_ended_to = 0
        self._num_ended = self._num_late = 0
        self._ended: set[int] = set()  # of later ones: a program may write after its successor

    def take(self, stream_id: int, piece: bytes) -> None:
        """Queue a piece; the first one of a stream begins it.

        Raises:
            StreamLie: As `GuestStream.put`, or there are too many streams.

        """
        stream = self._streams.get(stream_id)
        if stream is None:
            if stream_id <= self._all_ended_to or stream_id in self._ended:
                return self._drop_late()
            stream = self._begin(stream_id)
        return stream.put(piece)

    def _drop_late(self) -> None:
        """Drop what a program sent before it heard that its stream has ended."""
        self._num_late += 1
        if self._num_late > LATE_PIECES_MAX * (STREAMS_MAX + self._num_ended):
            raise StreamLie("the guest writes to streams that have ended")

    def _begin(self, stream_id: int) -> GuestStream:
        if len(self._streams) >= STREAMS_MAX:
            raise StreamLie(f"the guest opened more than {STREAMS_MAX} streams")
        stream = self._streams[stream_id] = GuestStream(self._line, stream_id)
        task = asyncio.get_running_loop().create_task(self._run(stream_id, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _run(self, stream_id: int, stream: GuestStream) -> None:
        try:
            await self._serve(stream)
            await stream.close()
        except SandboxError:
            pass  # the program or its machine is gone
        finally:
            del self._streams[stream_id]
            self._end(stream_id)

    def _end(self, stream_id: int) -> None:
        self._num_ended += 1
        self._ended.add(stream_id)
        if len(self._ended) > ENDED_MAX:  # a copy's numbers go on from its original's
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
