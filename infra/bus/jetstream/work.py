"""Shared work: durable consumers whose deliveries must be settled, and decoding of deliveries.

`Intake` turns a stored message into a `Delivery`, or puts it on the dead-letter stream with the
cause.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Sequence

import msgspec
from nats.aio.msg import Msg

from penstock.infra.bus.archive.segments import ArchivedEvent
from penstock.infra.bus.claims import CLAIM_HEADER, Claims, claim_of
from penstock.infra.bus.jetstream.connection import NatsConnection
from penstock.infra.bus.jetstream.event_publisher import EventPublisher
from penstock.infra.bus.jetstream.provision import stream_name
from penstock.infra.bus.jetstream.puller import Puller
from penstock.messages.base import Event, Stream
from penstock.messages.bus import Delivery
from penstock.messages.control import MessageRejected
from penstock.messages.errors import CodecError
from penstock.messages.streams import (
    NUM_DELIVERIES_MAX,
    checked_event,
    durable_name,
    type_filter,
)

log = logging.getLogger(__name__)

ANSWER_HEADER = "Nats-Stream"
"""Header of a message that the server read from a stream, and sent where a request said."""


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a delivered message, read from its reply subject."""

    sequence: int
    consumer_sequence: int
    num_delivered: int
    stored_at: float
    num_pending: int
    """Number of later messages that match the filter of the consumer."""


def position(message: Msg) -> Position:
    """Parse `$JS.ACK.<stream>.<consumer>.<delivered>.<seq>.<consumer seq>.<ns>.<pending>`."""
    tokens = message.reply.split(".")
    # With a JetStream domain, two more tokens come first and one more comes last.
    start = 4 if len(tokens) == 9 else 6
    delivered, sequence, consumer_sequence, stored_ns, pending = map(int, tokens[start : start + 5])
    return Position(
        sequence=sequence,
        consumer_sequence=consumer_sequence,
        num_delivered=delivered,
        stored_at=stored_ns / 1e9,
        num_pending=pending,
    )


class Intake:
    """Decoder of messages from the server, for one run and one reader."""

    def __init__(
        self,
        connection: NatsConnection,
        claims: Claims,
        publisher: EventPublisher,
        *,
        run_id: str,
        name: str,
    ) -> None:
        self.connection = connection
        self.run_id = run_id
        self._claims = claims
        self._publisher = publisher
        self._name = name

    async def accept(self, stream: Stream, message: Msg) -> Delivery | None:
        """Return the delivery, or None after moving an undecodable message to the dead letters."""
        place = position(message)
        try:
            event = await self.decode(message.subject, message.data, message.headers)
        except CodecError as error:
            await self.reject(stream, message, str(error))
            return None
        return Delivery(
            event=event,
            subject=message.subject,
            stream=stream,
            sequence=place.sequence,
            stored_at=place.stored_at,
            num_delivered=place.num_delivered,
        )

    async def accept_archived(self, stored: ArchivedEvent) -> Delivery | None:
        """Return the delivery, or None where readers of the stream had rejected it."""
        try:
            headers = {CLAIM_HEADER: "1"} if stored.is_claim else None
            event = await self.decode(stored.subject, stored.data, headers)
        except CodecError as error:
            log.warning("archived %s %d: %s", stored.stream, stored.sequence, error)
            return None
        return Delivery(
            event=event,
            subject=stored.subject,
            stream=stored.stream,
            sequence=stored.sequence,
            stored_at=stored.stored_at,
        )

    async def decode(self, subject: str, data: bytes, headers: dict[str, str] | None) -> Event:
        """Decode an event, and fetch it from the store if the message is a claim.

        Raises:
            CodecError: The message cannot be decoded, is no event, does not match its subject, or
                is an invalid claim.
            StoreUnreachableError: The store that holds the event did not answer.

        """
        # The server adds it to answers that carry stored bodies: no publisher of ours sends any.
        if headers and ANSWER_HEADER in headers:
            raise CodecError("an answer of the server, not an event")
        return checked_event(self.run_id, subject, await self._claims.unpack(data, headers))

    async def reject(self, stream: Stream, message: Msg, cause: str) -> None:
        """Publish an unusable message to the dead-letter stream, once per position and reader."""
        claim = None
        place = position(message)
        with contextlib.suppress(CodecError):
            claim = claim_of(message.data, message.headers)
        log.error("message %d of stream %s rejected: %s", place.sequence, stream, cause)
        rejected = MessageRejected(
            source_stream=stream,
            source_sequence=place.sequence,
            source_subject=message.subject,
            actor=self._name,
            cause=cause,
            data=b"" if claim else message.data,
            claim=claim,
        )
        # Shielded: a reader that is cancelled here must not lose the message without a trace.
        await asyncio.shield(self._publisher.publish([rejected]))


UNSETTLED_MAX = 4096
"""Most unsettled deliveries over all readers of one name; each reader has a smaller bound."""


class NatsWorkItem:
    """Delivery to be settled once; settling it again does nothing."""

    def __init__(
        self, delivery: Delivery, reply: str, connection: NatsConnection, puller: Puller
    ) -> None:
        self._delivery = delivery
        self._reply = reply
        self._connection = connection
        self._puller = puller
        self._is_settled = False

    @property
    def delivery(self) -> Delivery:
        """Delivered event with its position."""
        return self._delivery

    async def ack(self) -> None:
        """Report the work as done."""
        await self._settle(b"+ACK")

    async def nak(self, delay_s: float = 0.0) -> None:
        """Ask for another delivery after `delay_s` seconds."""
        await self._settle(b"-NAK " + json.dumps({"delay": int(delay_s * 1e9)}).encode())

    async def in_progress(self) -> None:
        """Reset the redelivery timer."""
        if not self._is_settled:
            await self._connection.send(self._reply, b"+WPI")

    async def term(self) -> None:
        """Ask the server never to deliver the event again."""
        await self._settle(b"+TERM")

    async def _settle(self, how: bytes) -> None:
        if self._is_settled:
            return
        # Before the send, which may wait for a connection: a second call must see it.
        self._is_settled = True
        self._puller.settle()
        await self._connection.send(self._reply, how)


class WorkQueue:
    """Share of one process in a durable consumer."""

    def __init__(
        self,
        intake: Intake,
        durable: str,
        types: Sequence[type[Event]],
        *,
        num_pending_max: int,
        ack_wait_s: float,
    ) -> None:
        self._connection = intake.connection
        self._intake = intake
        self._stream: Stream = types[0].stream
        self._name = durable_name(intake.run_id, durable)
        self._config = {
            "durable_name": self._name,
            "ack_policy": "explicit",
            "ack_wait": int(ack_wait_s * 1e9),
            "max_ack_pending": UNSETTLED_MAX,
            "max_deliver": -1,
            "deliver_policy": "all",
            "filter_subjects": [type_filter(intake.run_id, kind) for kind in types],
        }
        self.puller = Puller(
            intake.connection, stream_name(self._stream), self.create, num_pending_max
        )

    async def items(self) -> AsyncGenerator[NatsWorkItem, None]:
        """Iterate until the puller is closed."""
        async for message in self.puller.messages():
            delivery = await self._accept(message)
            if delivery is None:
                self.puller.settle()
                await self._connection.send(message.reply, b"+TERM")
            else:
                yield NatsWorkItem(delivery, message.reply, self._connection, self.puller)

    async def _accept(self, message: Msg) -> Delivery | None:
        num_delivered = position(message).num_delivered
        # An item that ends every worker before it can settle would come back forever.
        if num_delivered > NUM_DELIVERIES_MAX:
            cause = f"delivered {num_delivered - 1} times and never settled"
            await self._intake.reject(self._stream, message, cause)
            return None
        return await self._intake.accept(self._stream, message)

    async def create(self) -> str:
        """Create the consumer if it does not exist; return its name."""
        stream = stream_name(self._stream)
        await self._connection.api(
            f"CONSUMER.DURABLE.CREATE.{stream}.{self._name}",
            {"stream_name": stream, "config": self._config, "action": ""},
        )
        return self._name
