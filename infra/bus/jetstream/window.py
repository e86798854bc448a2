"""Publishing many messages to streams with a bounded number of acknowledgements outstanding."""

import asyncio
from typing import Any

from penstock.infra.bus.jetstream.answers import ConnectionLostError, check_answer, status
from penstock.infra.bus.jetstream.connection import NatsConnection


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
        task.add_done_callback(lambda _: self._room.release())
        self._tasks.append(task)
        await asyncio.sleep(0)

    async def answers(self) -> list[dict[str, Any] | BaseException]:
        """Return every acknowledgement, or why there is none, in the order of sending."""
        return await asyncio.gather(*self._tasks, return_exceptions=True)
