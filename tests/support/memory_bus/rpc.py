"""Request and reply in memory."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from tests.support.memory_bus.server import MemoryServer, Served

from penstock.messages.base import Message
from penstock.messages.bus import Serve
from penstock.messages.codec import decode, encode
from penstock.messages.errors import BusError, CodecError, DeadlineError, RemoteCallError
from penstock.messages.rpc import RemoteError, RemoteErrorKind, to_remote

RETRY_S = 0.1
RESEND_S = 5.0
"""A request whose first reply is so late is asked again, as after a broken connection."""

Replies = asyncio.Queue[bytes | None]


class MemoryRpcClient:
    """The requesting side."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def request(self, subject: str, message: Message, *, deadline_s: float) -> Message:
        """Return the first reply."""
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    with contextlib.suppress(DeadlineError):
                        return await self._first(subject, message)
        except TimeoutError as error:
            raise DeadlineError(f"{subject}: no reply within {deadline_s} s") from error

    async def _first(self, subject: str, message: Message) -> Message:
        async with contextlib.aclosing(self.stream(subject, message, idle_s=RESEND_S)) as replies:
            async for reply in replies:
                return reply
        raise BusError(f"{subject}: ended without a reply")

    async def stream(
        self, subject: str, message: Message, *, idle_s: float, is_served: bool = False
    ) -> AsyncGenerator[Message, None]:
        """Iterate over the replies; raises BusError where one was lost."""
        replies: Replies = asyncio.Queue()
        faults = self._server.faults
        is_asked = False
        is_whole = True
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    if not is_asked:
                        await self._ask(subject, message, replies, is_served=is_served)
                        is_asked = True
                    data = await replies.get()
                    await self._server.travel()
            except TimeoutError as error:
                raise DeadlineError(f"{subject}: no reply for {idle_s} s") from error
            if not is_whole:
                raise BusError(f"{subject}: a reply was lost")
            if self._server.happens(faults.lose_reply):
                is_whole = False
                continue
            if data is None:
                return
            try:
                reply = decode(data)
            except CodecError as error:
                raise RemoteCallError(RemoteErrorKind.FAILED, f"{subject}: {error}") from error
            if isinstance(reply, RemoteError):
                raise RemoteCallError(reply.kind, reply.error)
            yield reply

    async def _ask(
        self, subject: str, message: Message, replies: Replies, *, is_served: bool
    ) -> None:
        data = encode(message)
        while True:
            await self._server.travel()
            servers = self._server.services[subject]
            if servers:
                break
            if is_served:
                raise BusError(f"{subject}: nobody serves it")
            await asyncio.sleep(RETRY_S)
        if self._server.happens(self._server.faults.lose_request):
            return
        shared = [served for served in servers if served.is_shared]
        chosen = [served for served in servers if not served.is_shared]
        if shared:
            chosen.append(self._server.rng.choice(shared))
        for served in chosen:
            served.answer(data, replies)


def serve(
    server: MemoryServer, subject: str, handler: Serve, *, shared: bool
) -> Callable[[], Awaitable[None]]:
    """Answer requests; return the function that stops, in the middle of a reply if need be."""
    tasks: dict[asyncio.Task[None], None] = {}

    async def run(data: bytes, replies: Replies) -> None:
        try:
            async for reply in handler(decode(data)):
                replies.put_nowait(encode(reply))
        except Exception as error:
            replies.put_nowait(encode(to_remote(error)))
        replies.put_nowait(None)

    def answer(data: bytes, replies: Replies) -> None:
        task = asyncio.create_task(run(data, replies), name=f"serve {subject}")
        tasks[task] = None
        task.add_done_callback(tasks.pop)

    served = Served(answer=answer, is_shared=shared)
    server.services[subject].append(served)

    async def stop() -> None:
        if served in server.services[subject]:
            server.services[subject].remove(served)
        running = list(tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    return stop
