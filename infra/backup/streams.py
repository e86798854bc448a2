"""Copies streams as the server stores them, with sequences, times and consumers.

```
 $JS.API.STREAM.SNAPSHOT.<stream> ─▶ chunks to an inbox, each answered ─▶ <stream>.tar.s2
 $JS.API.STREAM.RESTORE.<stream>  ◀─ the same chunks, each answered    ◀─
```
Source: nats-server, `server/jetstream_api.go`; what `nats stream backup` does.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from nats.aio.msg import Msg

from penstock.infra.bus.jetstream.connection import (
    JetStreamError,
    NatsConnection,
    check_answer,
)
from penstock.infra.bus.jetstream.provision import stream_name
from penstock.infra.bus.jetstream.puller import STREAM_NOT_FOUND
from penstock.messages.base import Stream
from penstock.messages.errors import BusError, DeadlineError

CHUNK_BYTES = 128 << 10
CHUNK_S_MAX = 60.0
"""Longest wait for a chunk, or for the answer to one."""
STREAM_EXISTS = 10058


class StreamCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A server's description of a stream."""

    config: dict[str, Any]
    state: dict[str, Any]


async def copy_out(
    connection: NatsConnection, stream: Stream
) -> tuple[StreamCopy, AsyncIterator[bytes]] | None:
    """Return a stream's description and its chunks, or None if the stream does not exist.

    Raises:
        BusError: The connection broke, or the server refused.
        DeadlineError: No chunk arrived in time.

    """
    chunks: asyncio.Queue[Msg | None] = asyncio.Queue()
    inbox = connection.inbox(chunks.put_nowait, lambda: chunks.put_nowait(None))
    prefix = await inbox.__aenter__()
    body = {"deliver_subject": f"{prefix}.0", "chunk_size": CHUNK_BYTES, "jsck": True}
    try:
        answer = await connection.api(f"STREAM.SNAPSHOT.{stream_name(stream)}", body)
    except JetStreamError as error:
        await inbox.__aexit__(None, None, None)
        if error.code == STREAM_NOT_FOUND:
            return None
        raise

    async def read() -> AsyncIterator[bytes]:
        try:
            while True:
                async with asyncio.timeout(CHUNK_S_MAX):
                    message = await chunks.get()
                if message is None:
                    raise BusError(f"stream {stream}: the connection broke during a copy")
                if not message.data:
                    return
                yield message.data
                if message.reply:  # The server sends at most this many unanswered chunks.
                    await connection.send(message.reply, b"")
        except TimeoutError as error:
            raise DeadlineError(f"stream {stream}: no chunk within {CHUNK_S_MAX:g} s") from error
        finally:
            await inbox.__aexit__(None, None, None)

    return StreamCopy(config=answer["config"], state=answer["state"]), read()


async def copy_in(
    connection: NatsConnection,
    copy: StreamCopy,
    chunks: AsyncIterator[bytes],
    *,
    num_replicas: int,
) -> None:
    """Create a stream from a copy, on servers without a stream of that name.

    Raises:
        BusError: The servers refused, or the stream exists.
        DeadlineError: No answer arrived in time.

    """
    name = copy.config["name"]
    config = copy.config | {"num_replicas": num_replicas}
    try:
        answer = await connection.api(
            f"STREAM.RESTORE.{name}", {"config": config, "state": copy.state}
        )
    except JetStreamError as error:
        if error.code != STREAM_EXISTS:
            raise
        raise BusError(f"stream {name}: there already: restore to servers without it") from error
    subject = answer["deliver_subject"]
    async for chunk in chunks:
        await connection.ask(subject, chunk, deadline_s=CHUNK_S_MAX)
    check_answer(await connection.ask(subject, b"", deadline_s=CHUNK_S_MAX), f"restore of {name}")
