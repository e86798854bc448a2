"""Chunks of objects on their way: many sent before the first receipt, many read by one request."""

import asyncio
import json
from typing import Any

from nats.aio.msg import Msg

from penstock.infra.bus.jetstream.answers import ConnectionLostError, JetStreamError, status
from penstock.infra.bus.jetstream.connection import NatsConnection

CHUNK_BYTES = 256 << 10
WINDOW = 32
"""Chunks without a receipt: 8 MiB."""
BATCH = 32
"""Chunks asked for at once: 8 MiB, so that a few readers stay within what a client buffers."""
IDLE_S = 20.0


class Window:
    """Chunks on their way, whose receipts are awaited later."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        self._room = asyncio.Semaphore(WINDOW)
        self._tasks: list[asyncio.Task[dict[str, Any]]] = []

    async def send(self, subject: str, piece: bytes) -> None:
        """Send as soon as there is room; tasks start in order, and so do their sends."""
        await self._room.acquire()
        task = asyncio.create_task(receipt(self._connection, subject, piece, None))
        task.add_done_callback(lambda _: self._room.release())
        self._tasks.append(task)
        await asyncio.sleep(0)

    async def end(self) -> None:
        """Await every receipt.

        Raises:
            JetStreamError: the server refused a chunk.
            ConnectionLostError: the connection broke.

        """
        try:
            for answer in await asyncio.gather(*self._tasks):
                if (error := answer.get("error")) is not None:
                    raise JetStreamError(error.get("err_code", 0), error.get("description", ""))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


async def receipt(
    connection: NatsConnection, subject: str, data: bytes, headers: dict[str, str] | None
) -> dict[str, Any]:
    """Publish and return the stream's answer, which may be an `error`.

    Raises:
        ConnectionLostError: the connection broke, or no stream keeps the subject.
        DeadlineError: no answer within IDLE_S.

    """
    reply = await connection.ask(subject, data, deadline_s=IDLE_S, headers=headers)
    if status(reply):
        raise ConnectionLostError(f"{subject}: nobody keeps it")
    return json.loads(reply.data)


async def read_batch(
    connection: NatsConnection, stream: str, subject: str, sequence: int, num_wanted: int
) -> list[Msg]:
    """Ask for many messages of a subject at once; they come in order, and then a status.

    Args:
        connection: the connection.
        stream: which allows direct reads.
        subject: of the chunks.
        sequence: in the stream, to begin at.
        num_wanted: how many, at most; BATCH bounds it.

    Raises:
        ConnectionLostError: the connection broke.
        TimeoutError: nothing came for IDLE_S.

    """
    replies: asyncio.Queue[Msg | None] = asyncio.Queue()
    size = min(BATCH, num_wanted)
    body = json.dumps({"seq": sequence, "next_by_subj": subject, "batch": size}).encode()
    batch: list[Msg] = []
    with connection.replies(replies.put_nowait, lambda: replies.put_nowait(None)) as inbox:
        await connection.wait_connected()
        await connection.send(f"$JS.API.DIRECT.GET.{stream}", body, reply=inbox)
        while len(batch) < size:
            async with asyncio.timeout(IDLE_S):
                message = await replies.get()
            if message is None:
                raise ConnectionLostError(f"{subject}: connection broke")
            if status(message):
                break
            batch.append(message)
    return batch
