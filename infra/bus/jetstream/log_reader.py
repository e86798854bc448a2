"""Reads the log: one stream in order, across server breaks, without loss or repeats."""

import asyncio
import contextlib
import heapq
import secrets
from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import msgspec

from penstock.infra.bus.archive.reading import Archive
from penstock.infra.bus.claims import Claims, claim_of
from penstock.infra.bus.jetstream.connection import LOST, RETRY, JetStreamError, NatsConnection
from penstock.infra.bus.jetstream.provision import stream_name
from penstock.infra.bus.jetstream.puller import BATCH, Puller, read_batch
from penstock.infra.bus.jetstream.work import Intake, position
from penstock.messages.base import Event, Stream
from penstock.messages.bus import Delivery
from penstock.messages.errors import CodecError
from penstock.messages.retries import RetryPolicy, with_retries
from penstock.messages.streams import STREAMS, type_filter

READ_AHEAD = 128
"""Most events in flight to one reader of one stream; at most 64 MiB."""
INACTIVE_S = 60.0
DROP_S_MAX = 2.0
CREATE_S_MAX = 5.0
"""Longest wait for a new consumer: its server may have died, and a retry may get another."""
SAME_S = 1e-4
"""Tolerance when times of one event are compared; they are rounded in transit."""
_AGAIN = RetryPolicy(pause_s=0.1, pause_s_max=1.0, deadline_s=60.0)
"""Retries of an unanswered read, while a cluster elects leaders or a server restarts."""
T = TypeVar("T", "Delivery", "RawMessage")


class LogReader:
    """Reader of one stream that keeps its own position.

    The position is not kept on the server: whatever happens to the connection, a new consumer
    starts right after the last event that was yielded.
    """

    def __init__(
        self,
        intake: Intake,
        types: Sequence[type[Event]],
        *,
        after: int,
        stop_at_end: bool,
        archive: Archive,
    ) -> None:
        self._connection = intake.connection
        self._intake = intake
        self._archive = archive
        self._types = {kind.__name__ for kind in types}
        self._stream: Stream = types[0].stream
        self._filters = [type_filter(intake.run_id, kind) for kind in types]
        self._last = after
        self._stop_at_end = stop_at_end
        self._end: int | None = None
        self._last_at = 0.0
        """Unix seconds at which the server stored the last event; 0 before the first."""
        self._name = ""
        self._expected = 1
        self.puller = Puller(intake.connection, stream_name(self._stream), self._ensure, READ_AHEAD)

    async def deliveries(self) -> AsyncGenerator[Delivery, None]:
        """Iterate in stream order; ends only with `stop_at_end` or when the puller is closed."""
        async for delivery in self._archived():
            yield delivery
        async for message in self.puller.messages():
            self.puller.settle()
            # What was archived since may be gone from the stream, unread by our consumer.
            if await self._archive.end(self._stream) > self._last:
                num_read = 0
                async for delivery in self._archived():
                    num_read += 1
                    yield delivery
                if num_read:
                    self.puller.restart()
                    continue
            place = position(message)
            # A gap means that a delivery was lost with a connection: read again from `_last`.
            if place.consumer_sequence != self._expected:
                self.puller.restart()
                continue
            self._expected += 1
            if place.sequence <= self._last:
                continue
            if self._end is not None and place.sequence > self._end:
                return
            self._last, self._last_at = place.sequence, place.stored_at
            delivery = await self._intake.accept(self._stream, message)
            if delivery is not None:
                yield delivery
            if self._end is not None and (place.sequence == self._end or place.num_pending == 0):
                return

    async def _archived(self) -> AsyncGenerator[Delivery, None]:
        """Yield what the archive has after the last event, and go on after it."""
        end = await self._archive.end(self._stream)
        async for stored in self._archive.events(self._stream, self._last, self._types):
            self._last, self._last_at = stored.sequence, stored.stored_at
            delivery = await self._intake.accept_archived(stored)
            if delivery is not None:
                yield delivery
        self._last = max(self._last, end)

    async def _ensure(self) -> str:
        """Create a consumer that starts after the last event; return its name."""
        # Messages of the old consumer would otherwise be yielded twice.
        self.puller.drop()
        stream = stream_name(self._stream)
        if self._stop_at_end or STREAMS[self._stream].in_memory:
            await self._look(stream)
        # A consumer that cannot be deleted now expires after INACTIVE_S.
        if self._name:
            call = f"CONSUMER.DELETE.{stream_name(self._stream)}.{self._name}"
            with contextlib.suppress(JetStreamError, *LOST):
                await self._connection.api(call, {}, deadline_s=DROP_S_MAX)
        answer = await with_retries(partial(self._create, stream), RETRY, retry_on=LOST)
        self._expected = 1
        if self._stop_at_end and answer["num_pending"] == 0:
            self.puller.close()
        return self._name

    async def _create(self, stream: str) -> dict[str, Any]:
        self._name = f"read-{secrets.token_hex(8)}"
        config = {
            "name": self._name,
            "ack_policy": "none",
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._last + 1,
            "filter_subjects": self._filters,
            "inactive_threshold": int(INACTIVE_S * 1e9),
            "mem_storage": True,
            "num_replicas": 1,
        }
        return await self._connection.api(
            f"CONSUMER.CREATE.{stream}.{self._name}",
            {"stream_name": stream, "config": config, "action": ""},
            deadline_s=CREATE_S_MAX,
        )

    async def _look(self, stream: str) -> None:
        """Find the end to stop at; start over if an in-memory stream was reset."""
        state = (await self._connection.api(f"STREAM.INFO.{stream}", {}))["state"]
        if STREAMS[self._stream].in_memory and await self._is_forgotten(stream, state):
            self._last = 0
        if self._stop_at_end and self._end is None:
            self._end = int(state["last_seq"])

    async def _is_forgotten(self, stream: str, state: dict[str, Any]) -> bool:
        """Return whether the sequence of the last event is now free, or holds another event."""
        # The creation time of the stream cannot tell: a cluster whose servers all restarted keeps
        # the stream and its time, while its events and sequences start over.
        is_held = state["first_seq"] <= self._last <= state["last_seq"]
        if not is_held or not self._last_at:
            return self._last > state["last_seq"]
        try:
            answer = await self._connection.api(f"STREAM.MSG.GET.{stream}", {"seq": self._last})
        except JetStreamError:  # Removed meanwhile: it was read, so nothing was missed.
            return False
        stored_at = stored_time(answer["message"]["time"])
        return abs(stored_at - self._last_at) > SAME_S


def stored_time(text: str) -> float:
    """Return a time of the server in Unix seconds, as deliveries have it, of nanoseconds."""
    whole, _, rest = text.partition(".")
    start = datetime.fromisoformat(f"{whole.removesuffix('Z')}+00:00")
    return (int(start.timestamp()) * 10**9 + int(rest.rstrip("Z").ljust(9, "0"))) / 1e9


async def live(readers: Sequence[LogReader]) -> AsyncGenerator[Delivery, None]:
    """Merge as events come; order holds inside each stream. A reader's failure is the caller's."""
    merged: asyncio.Queue[Delivery | Exception | None] = asyncio.Queue(1)

    async def pump(reader: LogReader) -> None:
        try:
            async for delivery in reader.deliveries():
                await merged.put(delivery)
            await merged.put(None)
        except Exception as error:  # Whatever it is: raised below, where someone listens.
            await merged.put(error)

    tasks = [asyncio.create_task(pump(reader)) for reader in readers]
    try:
        num_open = len(tasks)
        while num_open:
            delivery = await merged.get()
            if delivery is None:
                num_open -= 1
            elif isinstance(delivery, Exception):
                raise delivery
            else:
                yield delivery
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RawMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A stored message, not decoded: of any type and version."""

    stream: Stream
    sequence: int
    subject: str
    stored_at: float
    """Unix seconds, by the server's clock."""
    data: bytes
    claim_key: str = ""
    """Object that holds the message, where it was too large for the stream."""


async def read_raw(  # noqa: PLR0913
    connection: NatsConnection,
    claims: Claims,
    run_id: str,
    stream: Stream,
    *,
    after: int = 0,
    fetches: bool = True,
) -> AsyncGenerator[RawMessage, None]:
    """Read what one stream holds of a run by now; a payload that is gone is read as its claim.

    Args:
        connection: Connection to the server.
        claims: Reads payloads from the store.
        run_id: Whose messages.
        stream: The stream.
        after: Sequence to begin after.
        fetches: Whether to read a message from the store that is a claim, or yield the claim.

    Raises:
        BusError: Nobody serves the stream, or the connection broke, for too long.
        DeadlineError: No answer for too long.

    """
    name, subjects = stream_name(stream), f"ps.{run_id}.{stream}.>"
    end = int((await connection.api(f"STREAM.INFO.{name}", {}))["state"]["last_seq"])
    last = after
    while last < end:
        read = partial(read_batch, connection, name, subjects, last + 1, BATCH)
        batch = await with_retries(read, _AGAIN, retry_on=LOST)
        for message in batch:
            headers = message.headers or {}
            last = int(headers["Nats-Sequence"])
            data, claim_key = message.data, ""
            with contextlib.suppress(CodecError):
                claim = claim_of(data, headers)
                claim_key = claim.object_key if claim else ""
                data = await claims.fetch(data, headers) if fetches else data
            yield RawMessage(
                stream=stream,
                sequence=last,
                subject=headers["Nats-Subject"],
                stored_at=stored_time(headers["Nats-Time-Stamp"]),
                data=data,
                claim_key=claim_key,
            )
        if not batch:
            return


async def by_time(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Merge finite readers by the time at which the server stored each message."""
    heap: list[tuple[float, int, int, T]] = []

    async def push(n: int) -> None:
        delivery = await anext(streams[n], None)
        if delivery is not None:
            heapq.heappush(heap, (delivery.stored_at, n, delivery.sequence, delivery))

    for n in range(len(streams)):
        await push(n)
    while heap:
        _, n, _, delivery = heapq.heappop(heap)
        yield delivery
        await push(n)
