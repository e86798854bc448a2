"""Bulk transfer with JetStream: windowed publishing, batched reads, and a pulling consumer.

`PublishWindow` sends ahead of acknowledgements, `read_batch` reads many messages with one request,
and `Puller` keeps a bounded demand outstanding at a consumer.
"""

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from nats.aio.msg import Msg

from penstock.infra.bus.jetstream.connection import (
    LOST,
    NO_RESPONDERS,
    RETRY,
    ConnectionLostError,
    JetStreamError,
    NatsConnection,
    UnavailableError,
    check_answer,
    status,
)
from penstock.messages.errors import BusError, DeadlineError
from penstock.messages.retries import with_retries

BATCH = 32
"""Most messages per request; keeps a few readers of 256 KiB messages within client buffers."""
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
        JetStreamError: The stream refused the message.
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
        """Send as soon as there is room in the window; sends start in the order of calls."""
        await self._room.acquire()
        task = asyncio.create_task(
            publish_acked(self._connection, subject, data, headers, deadline_s=self._deadline_s)
        )
        task.add_done_callback(self._make_room)
        self._tasks.append(task)
        # Let the task reach its send, so that sends leave in the order of calls.
        await asyncio.sleep(0)

    def _make_room(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._room.release()
        if not task.cancelled():
            # Retrieve it: a sender that is cancelled never calls `answers`.
            task.exception()

    async def answers(self) -> list[dict[str, Any] | BaseException]:
        """Return every acknowledgement, or the error in its place, in the order of sending."""
        return await asyncio.gather(*self._tasks, return_exceptions=True)


async def read_batch(
    connection: NatsConnection, stream: str, subject: str, sequence: int, num_wanted: int
) -> list[Msg]:
    """Read up to `num_wanted` messages of a subject with one request, in stream order.

    Args:
        connection: Connection to the server.
        stream: Name of a stream that allows direct reads.
        subject: Subject, or pattern, of the messages.
        sequence: Stream sequence to begin at.
        num_wanted: Most messages to return; at most BATCH.

    Raises:
        ConnectionLostError: The connection broke, or no server has the stream at the moment.
        DeadlineError: Nothing arrived for IDLE_S.

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
            # Any other status ends the batch: the stream holds no more messages for now.
            if status(message):
                break
            batch.append(message)
    return batch


log = logging.getLogger(__name__)

EXPIRES_S = 20.0
HEARTBEAT_S = 1.0
STALL_S = 4.0
"""A pull without a message or heartbeat for this long counts as lost and is repeated."""
AWAY_S_MAX = 60.0
"""Longest absence of the server before the iteration ends with an error."""
STREAM_NOT_FOUND = 10059
"""Error code of a stream that is not provisioned yet, or was in memory before a restart."""
ENDED = {"404", "408"}


class Puller:
    """Reader of one consumer.

    At most `num_max` messages are delivered and unsettled, or requested. `ensure` creates the
    consumer and returns its name; it is called at the start, after every break, and after every
    stall.
    """

    def __init__(
        self,
        connection: NatsConnection,
        stream: str,
        ensure: Callable[[], Awaitable[str]],
        num_max: int,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._ensure = ensure
        self._num_max = num_max
        self._num_unsettled = 0
        self._asked: dict[str, int] = {}
        """Number of messages still to come, by pull number."""
        self._pulls = itertools.count()
        self._seen_at = 0.0
        self._is_broken = False
        self._is_closed = False
        self._wake = asyncio.Event()
        self._queue: asyncio.Queue[Msg | Exception | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def messages(self) -> AsyncGenerator[Msg, None]:
        """Iterate until `close`; the caller settles every message.

        Raises:
            BusError: The server was gone for too long, or refuses the consumer.
            Exception: Any other error of `ensure`.

        """
        self._task = asyncio.create_task(self._run(), name=f"pull {self._stream}")
        try:
            while (message := await self._queue.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                yield message
        finally:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def settle(self) -> None:
        """Mark one message as settled, which frees room for another."""
        self._num_unsettled -= 1
        self._wake.set()

    def drop(self) -> None:
        """Discard messages that arrived but were not yielded yet."""
        while not self._queue.empty():
            if isinstance(self._queue.get_nowait(), Msg):
                self._num_unsettled -= 1
        # The loop above may have removed the end mark, too.
        if self._is_closed:
            self._queue.put_nowait(None)

    def restart(self) -> None:
        """Create the consumer again."""
        self._on_break()

    def close(self) -> None:
        """End the iteration."""
        self._is_closed = True
        self._queue.put_nowait(None)

    async def _run(self) -> None:
        try:
            while True:
                async with asyncio.timeout(AWAY_S_MAX):
                    await self._connection.wait_connected()
                await self._pull(await self._until_ensured())
        except TimeoutError:
            self._queue.put_nowait(
                BusError(f"{self._stream}: no NATS server, or no such stream, for {AWAY_S_MAX} s")
            )
        except Exception as error:  # Of any kind: `messages` raises it in the reader's task.
            self._queue.put_nowait(error)

    async def _until_ensured(self) -> str:
        """Create the consumer as soon as its stream exists; return its name."""
        async with asyncio.timeout(AWAY_S_MAX):
            return await with_retries(
                self._ensure,
                RETRY,
                retry_on=(JetStreamError, *LOST),
                is_final=lambda error: getattr(error, "code", STREAM_NOT_FOUND) != STREAM_NOT_FOUND,
            )

    async def _pull(self, name: str) -> None:
        """Keep demand outstanding until something breaks."""
        self._asked.clear()
        self._is_broken = False
        self._seen_at = asyncio.get_running_loop().time()
        async with self._connection.inbox(self._on_message, self._on_break) as inbox:
            while not self._is_broken:
                self._wake.clear()
                await self._top_up(name, inbox)
                # Not `asyncio.wait_for`, which may lose a cancellation.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._wake.wait()
                self._check_stall()

    async def _top_up(self, name: str, inbox: str) -> None:
        num_asked = sum(self._asked.values())
        num_free = self._num_max - self._num_unsettled - num_asked
        # At least a quarter at a time: requests overlap with deliveries, but are not sent singly.
        if num_free < 1 or (num_asked and num_free < self._num_max // 4):
            return
        pull = str(next(self._pulls))
        self._asked[pull] = num_free
        body = {
            "batch": num_free,
            "expires": int(EXPIRES_S * 1e9),
            "idle_heartbeat": int(HEARTBEAT_S * 1e9),
        }
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{name}"
        await self._connection.send(subject, json.dumps(body).encode(), reply=f"{inbox}.{pull}")

    def _on_message(self, message: Msg) -> None:
        self._seen_at = asyncio.get_running_loop().time()
        if message.reply.startswith("$JS.ACK."):
            self._on_delivery(message)
            return
        code = status(message)
        if code in ENDED:
            self._asked.pop(message.subject.rsplit(".", 1)[-1], None)
            self._wake.set()
        # 100 is a heartbeat; anything else means that the consumer or its server is gone.
        elif code != "100":
            log.info("%s: pull ended: %s", self._stream, message.headers)
            self._on_break()

    def _on_delivery(self, message: Msg) -> None:
        """Queue a message and count it for the pull that it answers."""
        self._num_unsettled += 1
        self._queue.put_nowait(message)
        # The server serves pulls in turn, so a message belongs to the oldest one.
        oldest = next(iter(self._asked), None)
        if oldest is None:
            return
        self._asked[oldest] -= 1
        if self._asked[oldest] == 0:
            del self._asked[oldest]
            self._wake.set()

    def _on_break(self) -> None:
        self._is_broken = True
        self._wake.set()

    def _check_stall(self) -> None:
        silent_s = asyncio.get_running_loop().time() - self._seen_at
        if self._asked and silent_s > STALL_S:
            log.warning(
                "%s: pull silent for %.1f s; creating the consumer again", self._stream, silent_s
            )
            self._on_break()
