"""Many messages at once, to a stream ahead of their acknowledgements and from it in batches."""

import asyncio
import json
from typing import Any

from nats.aio.msg import Msg

from penstock.infra.bus.jetstream.answers import (
    NO_RESPONDERS,
    ConnectionLostError,
    UnavailableError,
    check_answer,
    status,
)
from penstock.infra.bus.jetstream.connection import NatsConnection
from penstock.messages.errors import DeadlineError

BATCH = 32
"""Messages requested at once: a few readers of 256 KiB each stay within what a client buffers."""
IDLE_S = 20.0


async def publish_acked(
    connection: NatsConnection,
    subject: str,
    data: bytes,
    headers: dict[str, str] | None = None,
    *,
    deadline_s: float,
) -> dict[str, Any]:
    """Publish once and return the stream's acknowledgement.

    Raises:
        JetStreamError: The stream refused.
        ConnectionLostError: The connection broke, or no stream keeps the subject yet.
        DeadlineError: No answer in time.

    """
    reply = await connection.ask(subject, data, deadline_s=deadline_s, headers=headers)
    if status(reply):
        raise ConnectionLostError(f"{subject}: no stream keeps it yet")
    return check_answer(reply, subject)


class PublishWindow:
    """Sends in order, at most `num_max` messages ahead of their acknowledgements."""

    def __init__(self, connection: NatsConnection, num_max: int, deadline_s: float) -> None:
        self._connection = connection
        self._deadline_s = deadline_s
        self._room = asyncio.Semaphore(num_max)
        self._tasks: list[asyncio.Task[dict[str, Any]]] = []

    async def send(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        """Send as soon as there is room; tasks start in order, and so do their sends."""
        await self._room.acquire()
        task = asyncio.create_task(
            publish_acked(self._connection, subject, data, headers, deadline_s=self._deadline_s)
        )
        task.add_done_callback(self._make_room)
        self._tasks.append(task)
        await asyncio.sleep(0)

    def _make_room(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._room.release()
        if not task.cancelled():
            task.exception()  # Read here, too: a sender that is cancelled asks for no answers.

    async def answers(self) -> list[dict[str, Any] | BaseException]:
        """Return every acknowledgement, or why there is none, in the order of sending."""
        return await asyncio.gather(*self._tasks, return_exceptions=True)


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
        ConnectionLostError: the connection broke, or nobody serves the stream for now.
        DeadlineError: nothing came for IDLE_S.

    """
    replies: asyncio.Queue[Msg | None] = asyncio.Queue()
    size = min(BATCH, num_wanted)
    body = json.dumps({"seq": sequence, "next_by_subj": subject, "batch": size}).encode()
    batch: list[Msg] = []
    with connection.replies(replies.put_nowait, lambda: replies.put_nowait(None)) as inbox:
        await connection.wait_connected()
        await connection.send(f"$JS.API.DIRECT.GET.{stream}", body, reply=inbox)
        while len(batch) < size:
            try:
                async with asyncio.timeout(IDLE_S):
                    message = await replies.get()
            except TimeoutError as error:
                raise DeadlineError(f"{subject}: no message within {IDLE_S} s") from error
            if message is None:
                raise ConnectionLostError(f"{subject}: connection broke")
            if status(message) == NO_RESPONDERS:
                raise UnavailableError(f"{subject}: nobody serves stream {stream}")
            if status(message):
                break
            batch.append(message)
    return batch
