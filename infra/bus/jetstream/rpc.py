"""Requests on core NATS: numbered replies, an explicit end, errors as values.

```
client ── request (reply to an inbox of its own) ──▶ one server of the queue group
      ◀── reply 0, reply 1, ... each with Penstock-Reply: n
      ◀── empty, Penstock-End: number of replies
```

A missing number means that a reply was lost with a connection; the client raises an error rather
than continue with a gap. A client that wants a single reply says so in the last part of its inbox
name, and receives that reply without a number or an end message.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

import nats.errors
from nats.aio.msg import Msg

from penstock.infra.bus.claims import Claims, PackedMessage
from penstock.infra.bus.jetstream.connection import (
    NO_RESPONDERS,
    RETRY,
    ConnectionLostError,
    NatsConnection,
    status,
)
from penstock.messages.base import Message
from penstock.messages.bus import Serve
from penstock.messages.errors import (
    BusError,
    CodecError,
    DeadlineError,
    PenstockError,
    QueueFullError,
    RemoteCallError,
)
from penstock.messages.rpc import RemoteError, RemoteErrorKind, to_remote
from penstock.messages.streams import service_subject

log = logging.getLogger(__name__)

PAYLOAD_BYTES_MAX = 512 << 10
REQUESTS_MAX = 1024
"""Most concurrent requests per served service; further ones are answered `busy`."""
REPLY_HEADER = "Penstock-Reply"
END_HEADER = "Penstock-End"
FIRST_ALONE = "-first"
"""Suffix of the inbox of a client that takes one reply."""


class RpcClient:
    """Client side of requests."""

    def __init__(self, connection: NatsConnection, claims: Claims, run_id: str) -> None:
        self._connection = connection
        self._claims = claims
        self._run_id = run_id

    async def request(self, service: str, message: Message, *, deadline_s: float) -> Message:
        """Return the first reply; asks again after a broken connection (see `Bus.request`).

        The deadline also covers claim checks, of the request and of the reply.
        """
        subject = service_subject(self._run_id, service)
        async with _within(service, deadline_s):
            packed = await self._claims.pack_call(message, PAYLOAD_BYTES_MAX)
            try:
                reply = await self._connection.ask_until_served(
                    subject,
                    packed.data,
                    deadline_s=deadline_s,
                    attempt_s=deadline_s,
                    headers=packed.headers,
                    suffix=FIRST_ALONE,
                )
            finally:
                # Nobody reads the request once the call is over.
                await self._claims.forget(packed.object_keys)
            if END_HEADER in (reply.headers or {}):
                raise BusError(f"{service}: ended without a reply")
            return await self._answer(service, reply)

    async def _answer(self, service: str, reply: Msg) -> Message:
        try:
            answer = await self._claims.unpack_reply(reply.data, reply.headers)
        except CodecError as error:
            text = f"{service}: bad reply: {error}"
            raise RemoteCallError(RemoteErrorKind.FAILED, text) from error
        if isinstance(answer, RemoteError):
            raise RemoteCallError(answer.kind, answer.error)
        return answer

    async def stream(
        self, service: str, message: Message, *, idle_s: float, is_served: bool
    ) -> AsyncGenerator[Message, None]:
        """See `Bus.stream_request`."""
        subject = service_subject(self._run_id, service)
        async with _within(service, idle_s):
            packed = await self._claims.pack_call(message, PAYLOAD_BYTES_MAX)
        replies = self._replies(service, subject, packed, idle_s, is_served=is_served)
        try:
            async with contextlib.aclosing(replies):
                async for answer in replies:
                    yield answer
        finally:
            await self._claims.forget(packed.object_keys)

    async def _replies(
        self, service: str, subject: str, packed: PackedMessage, idle_s: float, *, is_served: bool
    ) -> AsyncGenerator[Message, None]:
        queue: asyncio.Queue[Msg | None] = asyncio.Queue()
        with self._connection.replies(queue.put_nowait, lambda: queue.put_nowait(None)) as inbox:

            async def next_reply(num_before: int) -> Msg:
                while True:
                    # Only before the first reply: a later repeat would start the handler again.
                    if num_before == 0:
                        await self._connection.wait_connected()
                        await self._connection.send(
                            subject, packed.data, reply=inbox, headers=packed.headers
                        )
                    reply = await queue.get()
                    if reply is None:
                        raise ConnectionLostError(f"{service}: connection broke before the end")
                    if status(reply) != NO_RESPONDERS:
                        return reply
                    if is_served:
                        raise BusError(f"{service}: nobody serves it")
                    await asyncio.sleep(RETRY.pause_s)

            num_replies = 0
            while True:
                async with _within(service, idle_s):
                    reply = await next_reply(num_replies)
                    if _is_end(service, reply, num_replies):
                        return
                    answer = await self._answer(service, reply)
                num_replies += 1
                yield answer


class Server:
    """Server side of one service."""

    def __init__(
        self, connection: NatsConnection, claims: Claims, service: str, handler: Serve
    ) -> None:
        self._connection = connection
        self._claims = claims
        self._service = service
        self._handler = handler
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, subject: str, queue: str) -> Callable[[], Awaitable[None]]:
        """Subscribe; return the function that stops."""
        subscription = await self._connection.subscribe(subject, queue, self._on_request)
        # After the flush the server knows the subscription, so that no request misses it.
        await self._connection.flush()

        async def stop() -> None:
            with contextlib.suppress(nats.errors.Error):  # Stopped before, or disconnected.
                await subscription.unsubscribe()
            # A copy: each task removes itself from the set when it ends.
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        return stop

    async def _on_request(self, message: Msg) -> None:
        task = asyncio.create_task(self._answer(message), name=f"serve {self._service}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: Msg) -> None:
        num_replies = 0
        takes_one = message.reply.endswith(FIRST_ALONE)
        try:
            async for reply in self._replies(message):
                # Run the handler to its end even so: what it does last must not be skipped.
                if takes_one and num_replies:
                    continue
                packed = await self._pack(reply)
                number = {} if takes_one else {REPLY_HEADER: str(num_replies)}
                await self._connection.send(
                    message.reply, packed.data, headers=packed.headers | number
                )
                num_replies += 1
            if not takes_one or not num_replies:
                end = {END_HEADER: str(num_replies)}
                await self._connection.send(message.reply, b"", headers=end)
        except BusError as error:  # The client sees a missing number, or no reply in time.
            log.warning("%s: reply not sent: %s", self._service, error)

    async def _pack(self, reply: Message) -> PackedMessage:
        """Encode a reply, or in its place the error that prevents sending it."""
        try:
            return await self._claims.pack_call(reply, PAYLOAD_BYTES_MAX)
        except (PenstockError, OSError) as error:
            return await self._claims.pack_call(to_remote(error), PAYLOAD_BYTES_MAX)

    async def _replies(self, message: Msg) -> AsyncGenerator[Message, None]:
        """Yield the replies of the handler; an error becomes the last reply."""
        try:
            # Refuse before unpacking, which may fetch a large object.
            if len(self._tasks) > REQUESTS_MAX:
                log.warning("%s: request refused, %d in progress", self._service, REQUESTS_MAX)
                raise QueueFullError(f"{self._service}: {REQUESTS_MAX} requests are in work")  # noqa: TRY301
            request = await self._claims.unpack(message.data, message.headers)
            async for reply in self._handler(request):
                yield reply
        except Exception as error:
            if not isinstance(error, PenstockError):
                log.exception("%s: handler failed", self._service)
            yield to_remote(error)


@contextlib.asynccontextmanager
async def _within(service: str, deadline_s: float) -> AsyncGenerator[None]:
    """Bound the time that the body takes."""
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError as error:
        raise DeadlineError(f"{service}: no reply within {deadline_s} s") from error


def _is_end(service: str, reply: Msg, num_expected: int) -> bool:
    """Return whether a reply is the end message; raise BusError if a reply is missing."""
    headers = reply.headers or {}
    number = headers.get(END_HEADER, headers.get(REPLY_HEADER))
    if number != str(num_expected):
        raise BusError(f"{service}: expected reply {num_expected}, got {number}: some were lost")
    return END_HEADER in headers
