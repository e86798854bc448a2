"""The bus in memory: the same promises as NATS, with faults drawn from a seed."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import msgspec
from tests.support.memory_bus.log import Stored
from tests.support.memory_bus.rpc import MemoryRpcClient, serve
from tests.support.memory_bus.server import MemoryServer
from tests.support.memory_bus.work import MemoryDurable
from tests.support.memory_bus.work_item import MemoryWorkItem

from penstock.infra.bus.claims import CLAIM_HEADER, INLINE_BYTES, Claims, claim_of
from penstock.messages.base import Event, Message, Stream
from penstock.messages.bus import Delivery, ObjectStore, PublishReceipt, Serve, WorkItem
from penstock.messages.control import MessageRejected
from penstock.messages.errors import BusClosedError, CodecError
from penstock.messages.reading.claims import claim_key
from penstock.messages.streams import (
    NUM_DELIVERIES_MAX,
    STREAMS,
    check_followed,
    check_run_id,
    check_token,
    checked_event,
    event_subject,
    service_subject,
    type_filter,
)


class MemoryBus:
    """A `Bus` of one simulated process; many share a `MemoryServer`."""

    def __init__(
        self,
        server: MemoryServer,
        *,
        run_id: str,
        store: ObjectStore,
        name: str,
        inline_bytes: int = INLINE_BYTES,
    ) -> None:
        self._server = server
        self._run_id = check_run_id(run_id)
        self._claims = Claims(store, self._new_key, inline_bytes)
        self._name = check_token(name, "name")
        self._rpc_client = MemoryRpcClient(server)
        self._stops: list[Callable[[], Awaitable[None]]] = []
        self._is_closed = False
        self._is_cut = False

    @property
    def run_id(self) -> str:
        """The run whose subjects this bus speaks."""
        return self._run_id

    async def publish(self, events: Sequence[Event]) -> list[PublishReceipt]:
        """See `Bus.publish`."""
        self._check_open()
        outgoing = [await self._pack(event) for event in events]
        await self._server.travel()
        receipts: list[PublishReceipt] = []
        for stream, packed, object_keys in outgoing:
            log = self._server.logs[stream]
            message = msgspec.structs.replace(packed, stored_at=self._server.clock.now())
            receipt = log.store(message)
            self._server.notify()
            while self._server.happens(self._server.faults.lose_receipt):
                await self._server.travel()
                receipt = log.store(message)
            if receipt.is_duplicate:
                await self._claims.forget(object_keys)
            receipts.append(receipt)
        await self._server.travel()
        return receipts

    async def swap(self, event: Event, after: int) -> PublishReceipt:
        """See `Bus.swap`."""
        self._check_open()
        stream, packed, _ = await self._pack(event)
        await self._server.travel()
        message = msgspec.structs.replace(packed, stored_at=self._server.clock.now())
        receipt = self._server.logs[stream].swap(message, after)
        while self._server.happens(self._server.faults.lose_receipt):
            await self._server.travel()
            receipt = self._server.logs[stream].swap(message, after)
        self._server.notify()
        await self._server.travel()
        return receipt

    async def _pack(self, event: Event) -> tuple[Stream, Stored, tuple[str, ...]]:
        packed = await self._claims.pack(event, STREAMS[event.stream].max_event_bytes)
        message = Stored(
            sequence=0,
            subject=event_subject(self._run_id, event),
            data=packed.data,
            is_claim=bool(packed.headers),
            stored_at=0.0,
            publish_id=str(next(self._server.ids)),
        )
        return event.stream, message, packed.object_keys

    def _new_key(self, word: str) -> str:
        name = f"{word}-{next(self._server.ids)}"
        return claim_key(self._server.clock.now(), name)

    async def consume(
        self,
        durable: str,
        types: Sequence[type[Event]],
        *,
        num_pending_max: int,
        ack_wait_s: float = 30.0,
    ) -> AsyncGenerator[WorkItem, None]:
        """See `Bus.consume`."""
        server, faults = self._server, self._server.faults
        log = server.logs[types[0].stream]
        state = server.durables.setdefault(
            f"{self._run_id}-{durable}", MemoryDurable(log, self._prefixes(types))
        )
        num_unsettled = 0

        def on_settled() -> bool:
            nonlocal num_unsettled
            num_unsettled -= 1
            server.notify()
            return not self._is_cut

        while not self._is_closed:
            now = server.clock.now()
            taken = None
            if num_unsettled < num_pending_max:
                taken = state.take(now, ack_wait_s, server.rng, reorder=faults.reorder_delivery)
            if taken is None:
                await server.changed(state.next_time(now))
                continue
            if server.happens(faults.lose_delivery):
                continue
            delivery = await self._accept(log.stream, taken[0], taken[1])
            if delivery is None:
                state.ack(taken[0].sequence)
                continue
            if server.happens(faults.duplicate_delivery):
                state.again(delivery.sequence, now)
            num_unsettled += 1
            yield MemoryWorkItem(
                delivery, server, state, ack_wait_s=ack_wait_s, on_settled=on_settled
            )

    async def follow(
        self,
        types: Sequence[type[Event]],
        *,
        after: dict[Stream, int] | None = None,
        stop_at_end: bool = False,
    ) -> AsyncGenerator[Delivery, None]:
        """See `Bus.follow`."""
        check_followed(types)
        server = self._server
        prefixes = self._prefixes(types)
        streams = sorted({kind.stream for kind in types})
        last = {stream: (after or {}).get(stream, 0) for stream in streams}
        end = {stream: server.logs[stream].last_sequence for stream in streams}
        while not self._is_closed:
            heads = [head for stream in streams if (head := self._next(stream, last, prefixes))]
            if stop_at_end:
                heads = [(stream, head) for stream, head in heads if head.sequence <= end[stream]]
            if not heads and stop_at_end:
                return
            if not heads:
                await server.changed()
                continue
            if stop_at_end:
                stream, message = min(heads, key=lambda head: (head[1].stored_at, head[0]))
            else:
                stream, message = server.rng.choice(heads)
                await server.travel()
            last[stream] = message.sequence
            delivery = await self._accept(stream, message, 1)
            if delivery is not None:
                yield delivery

    def _next(
        self, stream: Stream, last: dict[Stream, int], prefixes: tuple[str, ...]
    ) -> tuple[Stream, Stored] | None:
        """Return the next message of a stream; what is passed over is not looked at again."""
        log = self._server.logs[stream]
        for sequence in range(last[stream] + 1, log.last_sequence + 1):
            message = log.get(sequence)
            if message is not None and message.subject.startswith(prefixes):
                return stream, message
            last[stream] = sequence
        return None

    async def last(self, event_type: type[Event], key: str | None = None) -> Delivery | None:
        """See `Bus.last`."""
        self._check_open()
        await self._server.travel()
        prefix = type_filter(self._run_id, event_type).removesuffix(">")
        log = self._server.logs[event_type.stream]
        found = log.newest(prefix + (key or ""), is_whole=key is not None)
        try:
            return None if found is None else await self._delivery(event_type.stream, found, 1)
        except CodecError:
            return None

    async def request(self, service: str, message: Message, *, deadline_s: float) -> Message:
        """See `Bus.request`."""
        self._check_open()
        subject = service_subject(self._run_id, service)
        return await self._rpc_client.request(subject, message, deadline_s=deadline_s)

    def stream_request(
        self, service: str, message: Message, *, idle_s: float, is_served: bool = False
    ) -> AsyncGenerator[Message, None]:
        """See `Bus.stream_request`."""
        self._check_open()
        subject = service_subject(self._run_id, service)
        return self._rpc_client.stream(subject, message, idle_s=idle_s, is_served=is_served)

    async def serve(
        self, service: str, handler: Serve, *, shared: bool = True
    ) -> Callable[[], Awaitable[None]]:
        """See `Bus.serve`."""
        self._check_open()
        subject = service_subject(self._run_id, service)
        stop = serve(self._server, subject, handler, shared=shared)
        self._stops.append(stop)
        return stop

    async def flush(self) -> None:
        """Nothing is ever buffered here."""
        self._check_open()

    async def close(self) -> None:
        """Stop all iterators and services; idempotent."""
        self._is_closed = True
        await asyncio.gather(*(stop() for stop in self._stops))
        self._stops.clear()
        self._server.notify()

    def crash(self) -> None:
        """Have no more of this process arrive at the server, as after a kill -9."""
        self._is_closed = True
        self._is_cut = True
        self._server.notify()

    def _check_open(self) -> None:
        if self._is_closed:
            raise BusClosedError("the bus was closed")

    def _prefixes(self, types: Sequence[type[Event]]) -> tuple[str, ...]:
        return tuple(type_filter(self._run_id, kind).removesuffix(">") for kind in types)

    async def _accept(self, stream: Stream, message: Stored, num_delivered: int) -> Delivery | None:
        """Return the delivery; None where it is unusable and is on the dead-letter stream."""
        try:
            return await self._delivery(stream, message, num_delivered)
        except CodecError as error:
            claim = None
            with contextlib.suppress(CodecError):
                claim = claim_of(message.data, _headers(message))
            rejected = MessageRejected(
                source_stream=stream,
                source_sequence=message.sequence,
                source_subject=message.subject,
                actor=self._name,
                cause=str(error),
                data=b"" if claim else message.data,
                claim=claim,
            )
            await self.publish([rejected])
            return None

    async def _delivery(self, stream: Stream, message: Stored, num_delivered: int) -> Delivery:
        if num_delivered > NUM_DELIVERIES_MAX:
            raise CodecError(f"delivered {num_delivered - 1} times and never settled")
        unpacked = await self._claims.unpack(message.data, _headers(message))
        event = checked_event(self._run_id, message.subject, unpacked)
        return Delivery(
            event=event,
            subject=message.subject,
            stream=stream,
            sequence=message.sequence,
            stored_at=message.stored_at,
            num_delivered=num_delivered,
        )


def _headers(message: Stored) -> dict[str, str] | None:
    return {CLAIM_HEADER: "1"} if message.is_claim else None
