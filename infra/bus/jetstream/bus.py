"""The bus on NATS JetStream."""

import asyncio
import base64
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any

from penstock.infra.bus.claims import CLAIM_HEADER, INLINE_BYTES, Claims
from penstock.infra.bus.jetstream import log_reader, rpc
from penstock.infra.bus.jetstream.access import Access
from penstock.infra.bus.jetstream.connection import NO_MESSAGE, JetStreamError, NatsConnection
from penstock.infra.bus.jetstream.event_publisher import EventPublisher
from penstock.infra.bus.jetstream.provision import (
    check_jetstream,
    provision,
    restore,
    stream_name,
)
from penstock.infra.bus.jetstream.puller import Puller
from penstock.infra.bus.jetstream.work import Intake, NatsWorkItem, WorkQueue
from penstock.messages.base import Event, Message, Stream
from penstock.messages.bus import Delivery, ObjectStore, PublishReceipt, Serve
from penstock.messages.errors import BusError, CodecError, DeadlineError
from penstock.messages.reading.claims import claim_key
from penstock.messages.streams import (
    check_followed,
    check_run_id,
    check_token,
    service_subject,
    type_filter,
)

log = logging.getLogger(__name__)


def _new_key(word: str) -> str:
    return claim_key(time.time(), f"{word}-{secrets.token_hex(12)}")


class NatsBus:
    """A `Bus` over one connection, created with `connect`."""

    def __init__(
        self,
        connection: NatsConnection,
        run_id: str,
        store: ObjectStore,
        name: str,
        inline_bytes: int = INLINE_BYTES,
    ) -> None:
        self._connection = connection
        connection.restore = self._restore
        self._run_id = check_run_id(run_id)
        self._claims = Claims(store, _new_key, inline_bytes)
        self._publisher = EventPublisher(connection, self._claims, run_id)
        self._intake = Intake(
            connection, self._claims, self._publisher, run_id=run_id, name=check_token(name, "name")
        )
        self._rpc = rpc.RpcClient(connection, self._claims, run_id)
        self._pullers: set[Puller] = set()
        self._stops: list[Callable[[], Awaitable[None]]] = []

    @classmethod
    async def connect(
        cls,
        where: str | Access,
        *,
        run_id: str,
        store: ObjectStore,
        name: str,
        inline_bytes: int = INLINE_BYTES,
    ) -> "NatsBus":
        """Connect; `name` identifies this process in the messages that it rejects.

        The parts of events above `inline_bytes` go to the store.

        Raises:
            BusError: The embedded server does not answer, or refused the connection.
            ConfigError: The same for servers that `[bus]` names.

        """
        return cls(await NatsConnection.connect(where, name), run_id, store, name, inline_bytes)

    @property
    def run_id(self) -> str:
        """Id of the run whose subjects this bus uses."""
        return self._run_id

    @property
    def num_breaks(self) -> int:
        """Number of times that the connection broke."""
        return self._connection.num_breaks

    async def provision(self) -> None:
        """Create all streams, or bring them up to date; idempotent."""
        await provision(self._connection)

    async def check_jetstream(self) -> None:
        """Check that JetStream answers; raises `ConfigError`."""
        await check_jetstream(self._connection)

    async def provision_work(
        self, durable: str, types: Sequence[type[Event]], *, ack_wait_s: float
    ) -> None:
        """Create the consumer of shared work, so that its lag is known before any worker is up."""
        work = WorkQueue(self._intake, durable, types, num_pending_max=1, ack_wait_s=ack_wait_s)
        await work.create()

    async def _restore(self) -> None:
        # Only the launcher may create streams; the others wait until it has.
        if not self._connection.access.may_provision:
            return
        try:
            await restore(self._connection)
        except (BusError, DeadlineError) as error:
            log.warning("in-memory streams were not created again: %s", error)

    async def publish(self, events: Sequence[Event]) -> list[PublishReceipt]:
        """See `Bus.publish`."""
        return await self._publisher.publish(events)

    async def swap(self, event: Event, after: int) -> PublishReceipt:
        """See `Bus.swap`."""
        return await self._publisher.swap(event, after)

    async def consume(
        self,
        durable: str,
        types: Sequence[type[Event]],
        *,
        num_pending_max: int,
        ack_wait_s: float = 30.0,
    ) -> AsyncGenerator[NatsWorkItem, None]:
        """See `Bus.consume`."""
        work = WorkQueue(
            self._intake,
            durable,
            types,
            num_pending_max=num_pending_max,
            ack_wait_s=ack_wait_s,
        )
        self._pullers.add(work.puller)
        items = work.items()
        try:
            async for item in items:
                yield item
        finally:
            self._pullers.discard(work.puller)
            await items.aclose()

    async def follow(
        self,
        types: Sequence[type[Event]],
        *,
        after: dict[Stream, int] | None = None,
        stop_at_end: bool = False,
    ) -> AsyncGenerator[Delivery, None]:
        """See `Bus.follow`."""
        check_followed(types)
        ordered = sorted(types, key=lambda kind: kind.stream)
        readers = [
            log_reader.LogReader(
                self._intake,
                list(kinds),
                after=(after or {}).get(stream, 0),
                stop_at_end=stop_at_end,
            )
            for stream, kinds in groupby(ordered, key=lambda kind: kind.stream)
        ]
        pullers = {reader.puller for reader in readers}
        self._pullers |= pullers
        merged = (
            log_reader.by_time([reader.deliveries() for reader in readers])
            if stop_at_end
            else log_reader.live(readers)
        )
        try:
            async for delivery in merged:
                yield delivery
        finally:
            self._pullers -= pullers
            await merged.aclose()

    async def last(self, event_type: type[Event], key: str | None = None) -> Delivery | None:
        """See `Bus.last`."""
        prefix = type_filter(self._run_id, event_type).removesuffix(">")
        subject = prefix + (">" if key is None else check_token(key, "key"))
        call = f"STREAM.MSG.GET.{stream_name(event_type.stream)}"
        try:
            answer = await self._connection.api(call, {"last_by_subj": subject})
        except JetStreamError as error:
            if error.code != NO_MESSAGE:
                raise
            return None
        stored = answer["message"]
        try:
            return await self._stored(event_type.stream, stored)
        except CodecError as error:
            log.warning("%s %s is unusable: %s", event_type.stream, stored["seq"], error)
            return None

    async def _stored(self, stream: Stream, stored: dict[str, Any]) -> Delivery:
        head = base64.b64decode(stored.get("hdrs", "")).decode(errors="replace")
        headers = {CLAIM_HEADER: "1"} if f"\n{CLAIM_HEADER}:" in head else None
        data = base64.b64decode(stored.get("data", ""))
        return Delivery(
            event=await self._intake.decode(stored["subject"], data, headers),
            subject=stored["subject"],
            stream=stream,
            sequence=stored["seq"],
            stored_at=datetime.fromisoformat(stored["time"]).timestamp(),
        )

    def read_raw(self, streams: Sequence[Stream]) -> AsyncGenerator[log_reader.RawMessage, None]:
        """Read what the streams hold by now, of any type and version, by time of storing."""
        return log_reader.by_time(
            [
                log_reader.read_raw(self._connection, self._claims, self._run_id, stream)
                for stream in streams
            ]
        )

    async def request(self, service: str, message: Message, *, deadline_s: float) -> Message:
        """See `Bus.request`."""
        return await self._rpc.request(service, message, deadline_s=deadline_s)

    def stream_request(
        self, service: str, message: Message, *, idle_s: float, is_served: bool = False
    ) -> AsyncGenerator[Message, None]:
        """See `Bus.stream_request`."""
        return self._rpc.stream(service, message, idle_s=idle_s, is_served=is_served)

    async def serve(
        self, service: str, handler: Serve, *, shared: bool = True
    ) -> Callable[[], Awaitable[None]]:
        """See `Bus.serve`."""
        server = rpc.Server(self._connection, self._claims, service, handler)
        subject = service_subject(self._run_id, service)
        stop = await server.start(subject, "servers" if shared else "")
        self._stops.append(stop)
        return stop

    async def flush(self) -> None:
        """Wait until the server has read all that was sent."""
        await self._connection.flush()

    async def close(self) -> None:
        """Stop all iterators and services, then disconnect; idempotent."""
        for puller in list(self._pullers):
            puller.close()
        await asyncio.gather(*(stop() for stop in self._stops))
        self._stops.clear()
        await self._connection.close()
