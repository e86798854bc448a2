"""Protocols of the event bus and the object store, implemented on NATS and in memory."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from penstock.messages.base import Event, Message, Stream


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """Stored event, as read from its stream."""

    event: Event
    subject: str
    stream: Stream
    sequence: int
    stored_at: float
    """Time of storage in Unix seconds, on the server's clock."""
    num_delivered: int = 1


class PublishReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """Result of publishing one event durably."""

    stream: Stream
    sequence: int
    """Position in the stream; 0 if the event was already there."""
    is_duplicate: bool


class WorkItem(Protocol):
    """Delivery that its consumer must settle exactly once."""

    @property
    def delivery(self) -> Delivery:
        """The delivered event."""
        ...

    async def ack(self) -> None:
        """Report the item as done: it is not delivered again."""
        ...

    async def nak(self, delay_s: float = 0.0) -> None:
        """Return the item; any consumer may get it again after `delay_s` seconds."""
        ...

    async def in_progress(self) -> None:
        """Reset the redelivery timer."""
        ...

    async def term(self) -> None:
        """Give the item up: it is never delivered again."""
        ...


Serve = Callable[[Message], AsyncIterator[Message]]
"""Request handler, which yields one or more replies."""


class Bus(Protocol):
    """Durable streams and request-reply within one run.

    Every method raises BusError when the server is away for longer than the operation's deadline,
    and BusClosedError after `close`.
    """

    @property
    def run_id(self) -> str:
        """Id of the run, which is part of every subject."""
        ...

    async def publish(self, events: Sequence[Event]) -> list[PublishReceipt]:
        """Store events durably and in order; return when all are synced to disk.

        An event whose key is already on its stream is not stored again, and its receipt says
        `is_duplicate`. The parts of a large event go to the object store, and claims take their
        place (`Event.parts`, `Event.claims`). An event that is too large even without its parts is
        stored there whole, and readers of the bus get it back as if it were not.
        Server restarts are retried within the deadline.
        """
        ...

    async def swap(self, event: Event, after: int) -> PublishReceipt:
        """Store an event by compare-and-swap, on a stream that keeps the newest event per subject.

        Args:
            event: Event that replaces the newest of its subject.
            after: Sequence of the event to replace; 0 if the subject has none.

        Returns:
            Receipt, with `is_duplicate` if another event came first and nothing was stored.

        """
        ...

    def consume(
        self,
        durable: str,
        types: Sequence[type[Event]],
        *,
        num_pending_max: int,
        ack_wait_s: float = 30.0,
    ) -> AsyncGenerator[WorkItem, None]:
        """Share the events of one stream among all consumers that use the name `durable`.

        An event is redelivered until it is settled. At most `num_pending_max` events are unsettled
        at once in this iterator. The bound applies per reader, so that events still held by a
        killed reader (until its ack wait ends) do not block the reader that replaces it.
        Undecodable messages go to the dead-letter stream with their cause.
        """
        ...

    def follow(
        self,
        types: Sequence[type[Event]],
        *,
        after: dict[Stream, int] | None = None,
        stop_at_end: bool = False,
    ) -> AsyncGenerator[Delivery, None]:
        """Read the log: every stored event of the given types, in stream order, then new ones.

        Order is guaranteed within a stream, not between streams. Nothing is acknowledged; the
        reader keeps track of its position. `after` gives the last sequence already seen, by stream.
        With `stop_at_end` the iterator stops where the streams ended when it was called, and
        interleaves them by `stored_at`.

        Raises:
            ConfigError: One of `types` is kept on a work queue, which cannot be followed.

        """
        ...

    async def last(self, event_type: type[Event], key: str | None = None) -> Delivery | None:
        """Return the newest stored event of a type, or of a type and key.

        Returns None if there is none, or if the message stored there is not such an event.
        """
        ...

    async def request(self, service: str, message: Message, *, deadline_s: float) -> Message:
        """Send a request to one server of `service` and return its first reply.

        The request is repeated if the connection breaks, possibly to another server, so servers
        must treat a second request with the same ids as the first.

        Raises:
            RemoteCallError: The server answered with RemoteError.
            DeadlineError: There is no server, or no reply came in time.

        """
        ...

    def stream_request(
        self, service: str, message: Message, *, idle_s: float, is_served: bool = False
    ) -> AsyncGenerator[Message, None]:
        """Send a request to one server and iterate over its replies until it ends them.

        Waits for a server to appear; with `is_served`, fails at once if there is none.

        Raises:
            RemoteCallError: The server answered with RemoteError.
            BusError: The connection broke before the last reply, a reply was lost, or there is no
                server although `is_served`.
            DeadlineError: There is no server, or `idle_s` seconds passed without a reply.

        """
        ...

    async def serve(
        self, service: str, handler: Serve, *, shared: bool = True
    ) -> Callable[[], Awaitable[None]]:
        """Answer requests to a service, and return the function that stops serving.

        With `shared`, each request goes to one of the service's servers; otherwise to all of them.
        An error raised by the handler is sent as RemoteError.
        """
        ...

    async def flush(self) -> None:
        """Wait until everything sent so far has left this process."""
        ...

    async def close(self) -> None:
        """Stop all iterators and services; idempotent."""
        ...


class ObjectStore(Protocol):
    """Store of immutable objects by key, for the large parts of messages (claim check)."""

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Store an object atomically; storing the same bytes again is harmless.

        Raises:
            CorruptDataError: The key already holds different bytes.
            OSError: The write failed, e.g. for lack of space; nothing is left behind.

        """
        ...

    async def get(self, key: str) -> bytes:
        """Return the bytes of an object.

        Raises:
            NotFoundError: There is no such object.

        """
        ...

    async def exists(self, key: str) -> bool:
        """Return whether an object exists."""
        ...

    async def delete(self, key: str) -> None:
        """Delete an object; a missing one is not an error."""
        ...

    async def keys(self, prefix: str) -> list[str]:
        """List the keys that start with `prefix`, sorted."""
        ...
