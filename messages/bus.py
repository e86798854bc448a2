"""The event bus as actors see it. NATS and the seeded in-memory bus stand behind it."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from penstock.messages.base import Event, Message, Stream


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """One stored event as it comes out of a stream."""

    event: Event
    subject: str
    stream: Stream
    sequence: int
    stored_at: float
    """Unix seconds, by the server's clock."""
    num_delivered: int = 1


class PublishReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to one durable publish."""

    stream: Stream
    sequence: int
    """0 where the event was there already."""
    is_duplicate: bool


class WorkItem(Protocol):
    """A delivery that someone must settle, once."""

    @property
    def delivery(self) -> Delivery:
        """What was delivered."""
        ...

    async def ack(self) -> None:
        """Done: do not deliver again."""
        ...

    async def nak(self, delay_s: float = 0.0) -> None:
        """Deliver again, to anyone, after `delay_s`."""
        ...

    async def in_progress(self) -> None:
        """Reset the redelivery timer."""
        ...

    async def term(self) -> None:
        """Never deliver again."""
        ...


Serve = Callable[[Message], AsyncIterator[Message]]
"""A request handler: yields one or more replies."""


class Bus(Protocol):
    """Durable streams, request-reply, all within one run.

    Raises, everywhere: BusError when the server is gone for longer than the operation's deadline,
    BusClosedError after `close`.
    """

    @property
    def run_id(self) -> str:
        """The run whose subjects this bus speaks."""
        ...

    async def publish(self, events: Sequence[Event]) -> list[PublishReceipt]:
        """Store events durably, in order; returns when all are synced to disk.

        An event whose key is on its stream already is not stored again: its receipt says
        `is_duplicate`. Of a large event, the parts go to the object store and claims take their
        place (`Event.parts`, `Event.claims`); one that is too large without them goes there whole
        and is read back by the bus.
        Retries through a server restart, within the deadline.
        """
        ...

    async def swap(self, event: Event, after: int) -> PublishReceipt:
        """Store an event of a stream that keeps the newest of each subject, if none came between.

        Args:
            event: It takes the place of its subject's newest.
            after: Sequence of that one; 0 where there is none.

        Returns:
            A receipt that says `is_duplicate` where another one came first: nothing is stored.

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
        """Share events of one stream among all consumers of the name `durable`.

        Each is delivered until it is settled; at most `num_pending_max` are unsettled at once in
        this iterator. The bound is each reader's own: what a killed reader held, until its ack
        wait ends, does not keep its successor waiting. Undecodable messages go to the dead-letter
        stream with their cause.
        """
        ...

    def follow(
        self,
        types: Sequence[type[Event]],
        *,
        after: dict[Stream, int] | None = None,
        stop_at_end: bool = False,
    ) -> AsyncGenerator[Delivery, None]:
        """Read the log: every stored event of the types, in stream order, then live ones.

        Order holds inside a stream, not between streams. Nothing is acknowledged; the reader
        owns its position. `after` gives, by stream, the last sequence already seen.
        With `stop_at_end` the iterator ends where the streams ended when it was called, and
        interleaves streams by `stored_at`.

        Raises:
            ConfigError: One of `types` is kept on a work queue, which has no log.

        """
        ...

    async def last(self, event_type: type[Event], key: str | None = None) -> Delivery | None:
        """Return the newest stored event of a type (of one key, if given).

        None where there is none, or where what is stored there is no such event.
        """
        ...

    async def request(self, service: str, message: Message, *, deadline_s: float) -> Message:
        """Ask one server of `service`; return its first reply.

        Where the connection breaks it is asked again, maybe of another server, which
        treats a second request of the same ids as the first.

        Raises:
            RemoteCallError: The server answered with RemoteError.
            DeadlineError: No server, or no reply in time.

        """
        ...

    def stream_request(
        self, service: str, message: Message, *, idle_s: float, is_served: bool = False
    ) -> AsyncGenerator[Message, None]:
        """Ask one server; iterate over its replies until it ends them.

        It waits for a server, or, with `is_served`, fails at once where there is none.

        Raises:
            RemoteCallError: The server answered with RemoteError.
            BusError: The connection broke in the middle, or a reply was lost; or nobody serves
                this though it `is_served`.
            DeadlineError: No server, or `idle_s` passed without a reply.

        """
        ...

    async def serve(
        self, service: str, handler: Serve, *, shared: bool = True
    ) -> Callable[[], Awaitable[None]]:
        """Answer requests: with `shared` one server of many gets each, else all get all.

        Returns the function that stops serving. An error of the handler is sent as RemoteError.
        """
        ...

    async def flush(self) -> None:
        """Wait until all that was sent has left this process."""
        ...

    async def close(self) -> None:
        """Stop all iterators and services; idempotent."""
        ...


class ObjectStore(Protocol):
    """Bulk bytes by key: the claim check. Objects are immutable."""

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Store atomically; putting the same bytes again is harmless.

        Raises:
            CorruptDataError: Other bytes are there under this key.
            OSError: e.g. no space; nothing is left behind.

        """
        ...

    async def get(self, key: str) -> bytes:
        """Return the bytes.

        Raises:
            NotFoundError: No such object.

        """
        ...

    async def exists(self, key: str) -> bool:
        """Return whether the object is there."""
        ...

    async def delete(self, key: str) -> None:
        """Remove it; absent is fine."""
        ...

    async def keys(self, prefix: str) -> list[str]:
        """List keys that start with `prefix`, sorted."""
        ...
