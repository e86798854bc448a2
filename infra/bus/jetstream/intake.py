"""From a stored message to a `Delivery`, or to the dead-letter stream with its cause."""

import asyncio
import contextlib
import logging

import msgspec
from nats.aio.msg import Msg

from penstock.infra.bus.claims import Claims, claim_of
from penstock.infra.bus.jetstream.connection import NatsConnection
from penstock.infra.bus.jetstream.event_publisher import EventPublisher
from penstock.messages.base import Event, Stream
from penstock.messages.bus import Delivery
from penstock.messages.control import MessageRejected
from penstock.messages.errors import CodecError
from penstock.messages.streams import checked_event

log = logging.getLogger(__name__)


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a delivered message, read from its reply subject."""

    sequence: int
    consumer_sequence: int
    num_delivered: int
    stored_at: float
    num_pending: int
    """Messages of the consumer's filter after this one."""


def position(message: Msg) -> Position:
    """Read `$JS.ACK.<stream>.<consumer>.<delivered>.<seq>.<consumer seq>.<ns>.<pending>`.

    With a domain there are two tokens more in front, and one behind.
    """
    tokens = message.reply.split(".")
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
    """Decodes what comes from the server, for one run and one reader."""

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
        """Return the delivery; None where it was undecodable and is on the dead-letter stream."""
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

    async def decode(self, subject: str, data: bytes, headers: dict[str, str] | None) -> Event:
        """Decode an event, claim check included.

        Raises:
            CodecError: Undecodable, no event, not the one that its subject names, or its claim is
                not good.
            StoreUnreachableError: Its claim lies in a store that did not answer.

        """
        return checked_event(self.run_id, subject, await self._claims.unpack(data, headers))

    async def reject(self, stream: Stream, message: Msg, cause: str) -> None:
        """Keep an unusable message, once for each place and reader."""
        claim = None
        place = position(message)
        with contextlib.suppress(CodecError):
            claim = claim_of(message.data, message.headers)
        log.error("%s %s rejected: %s", stream, place.sequence, cause)
        rejected = MessageRejected(
            source_stream=stream,
            source_sequence=place.sequence,
            source_subject=message.subject,
            actor=self._name,
            cause=cause,
            data=b"" if claim else message.data,
            claim=claim,
        )
        await asyncio.shield(self._publisher.publish([rejected]))
