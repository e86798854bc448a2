"""Durable publishing of events, in atomic batches or in a window of single messages."""

import asyncio
import base64
import itertools
import logging
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.infra.bus.claims import Claims
from penstock.infra.bus.jetstream.connection import (
    LOST,
    NO_MESSAGE,
    RETRY,
    WRONG_LAST_SEQUENCE,
    JetStreamError,
    NatsConnection,
)
from penstock.infra.bus.jetstream.provision import stream_name
from penstock.infra.bus.jetstream.puller import PublishWindow, publish_acked
from penstock.messages.base import Event, Stream
from penstock.messages.bus import PublishReceipt
from penstock.messages.errors import BusError
from penstock.messages.streams import STREAMS, Dedup, event_subject

log = logging.getLogger(__name__)
PUBLISH_S_MAX = 60.0
"""Longest time in seconds that a publish waits for an absent server."""
ATTEMPT_S = 10.0
WINDOW = 256
BATCH_EVENTS_MAX = 500
"""Most events per atomic batch; the server allows 1000."""
BATCH_BYTES_MAX = 8 << 20
EXPECTED_HEADER = "Nats-Expected-Last-Subject-Sequence"
"""Header with the expected sequence of the newest message of a subject, 0 for none.

The server stores the message only if the expectation holds."""
PUBLISH_HEADER = "Penstock-Publish"
"""Header that identifies one publish.

It tells our own first copy, whose acknowledgement was lost, from the copy of another publisher."""


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """Encoded event, ready to send."""

    stream: Stream
    subject: str
    data: bytes
    headers: dict[str, str]
    object_keys: tuple[str, ...]
    """Keys of the objects that only this event references."""


class EventPublisher:
    """Publisher that stores each event once."""

    def __init__(self, connection: NatsConnection, claims: Claims, run_id: str) -> None:
        self._connection = connection
        self._claims = claims
        self._run_id = run_id
        self._ids = (f"{secrets.token_hex(6)}-{n}" for n in itertools.count())

    async def publish(self, events: Sequence[Event]) -> list[PublishReceipt]:
        """See `Bus.publish`."""
        outgoing = [await self._pack(event) for event in events]
        receipts = await self._publish(outgoing)
        for item, receipt in zip(outgoing, receipts, strict=True):
            # The stored event has objects of its own; nothing will ever reference these.
            if receipt.is_duplicate:
                await self._claims.forget(item.object_keys)
        return receipts

    async def swap(self, event: Event, after: int) -> PublishReceipt:
        """See `Bus.swap`."""
        item = await self._pack(event)
        headers = item.headers | {EXPECTED_HEADER: str(after)}
        (receipt,) = await self._publish([msgspec.structs.replace(item, headers=headers)])
        return receipt

    async def _publish(self, outgoing: list[Outgoing]) -> list[PublishReceipt]:
        receipts: list[PublishReceipt] = []
        try:
            async with asyncio.timeout(PUBLISH_S_MAX):
                for batch in _batches(outgoing):
                    receipts += await self._publish_batch(batch)
        except TimeoutError as error:
            raise BusError(
                f"publish: {len(receipts)} of {len(outgoing)} events were stored within "
                f"{PUBLISH_S_MAX} s; next is {outgoing[len(receipts)].subject}; a server that does "
                "not answer is down, or its disk is full: see its log (nats.log)"
            ) from error
        return receipts

    async def _pack(self, event: Event) -> Outgoing:
        spec = STREAMS[event.stream]
        subject = event_subject(self._run_id, event)
        packed = await self._claims.pack(event, spec.max_event_bytes)
        headers = packed.headers | {PUBLISH_HEADER: next(self._ids)}
        if spec.dedup is Dedup.SUBJECT:
            headers[EXPECTED_HEADER] = "0"
        elif spec.dedup is Dedup.MESSAGE_ID:
            headers["Nats-Msg-Id"] = subject
        return Outgoing(
            stream=event.stream,
            subject=subject,
            data=packed.data,
            headers=headers,
            object_keys=packed.object_keys,
        )

    async def _publish_batch(self, batch: list[Outgoing]) -> list[PublishReceipt]:
        """Publish a batch atomically, or one by one if a part of it is stored already."""
        if len(batch) > 1 and STREAMS[batch[0].stream].dedup is Dedup.SUBJECT:
            await self._connection.wait_connected()
            try:
                return await self._commit(batch)
            except (JetStreamError, *LOST) as error:
                log.debug("batch of %d events is sent one by one: %s", len(batch), error)
        return await self._publish_window(batch)

    async def _commit(self, batch: list[Outgoing]) -> list[PublishReceipt]:
        batch_id = next(self._ids)
        for n, item in enumerate(batch[:-1], start=1):
            headers = _batched(item, batch_id, n)
            await self._connection.send(item.subject, item.data, headers=headers)
        last = batch[-1]
        headers = {**_batched(last, batch_id, len(batch)), "Nats-Batch-Commit": "1"}
        answer = await publish_acked(
            self._connection, last.subject, last.data, headers, deadline_s=ATTEMPT_S
        )
        first = answer["seq"] - len(batch) + 1
        return [_receipt(item, first + n, False) for n, item in enumerate(batch)]

    async def _publish_window(self, batch: list[Outgoing]) -> list[PublishReceipt]:
        receipts: dict[int, PublishReceipt] = {}
        # A batch may have been committed although its acknowledgement was lost.
        is_retry = len(batch) > 1
        while missing := [n for n in range(len(batch)) if n not in receipts]:
            await self._connection.wait_connected()
            window = PublishWindow(self._connection, WINDOW, ATTEMPT_S)
            for n in missing:
                await window.send(batch[n].subject, batch[n].data, batch[n].headers)
            for n, answer in zip(missing, await window.answers(), strict=True):
                if not isinstance(answer, LOST):
                    receipts[n] = await self._judge(batch[n], answer, is_retry)
            if len(receipts) < len(batch):
                num_open = len(batch) - len(receipts)
                log.warning("%d of %d events unacknowledged; sending again", num_open, len(batch))
                await asyncio.sleep(RETRY.pause_s)
            is_retry = True
        return [receipts[n] for n in range(len(batch))]

    async def _judge(
        self, item: Outgoing, answer: dict[str, Any] | BaseException, is_retry: bool
    ) -> PublishReceipt:
        """Return the receipt: stored now, stored by an earlier attempt, or a duplicate."""
        if isinstance(answer, dict):
            if not answer.get("duplicate"):
                return _receipt(item, answer["seq"], False)
        elif not (isinstance(answer, JetStreamError) and answer.code in WRONG_LAST_SEQUENCE):
            raise answer
        sequence = await self._own_copy(item) if is_retry else 0
        return _receipt(item, sequence, sequence == 0)

    async def _own_copy(self, item: Outgoing) -> int:
        """Return the sequence of the stored event if this publish stored it, else 0."""
        call = f"STREAM.MSG.GET.{stream_name(item.stream)}"
        try:
            stored = (await self._connection.api(call, {"last_by_subj": item.subject}))["message"]
        except JetStreamError as error:
            if error.code != NO_MESSAGE:
                raise  # It may be stored: nothing may count as a copy, nor be deleted.
            return 0  # Done and removed from its work queue meanwhile.
        return int(stored["seq"]) if item.headers[PUBLISH_HEADER] in _header_text(stored) else 0


def _batches(outgoing: list[Outgoing]) -> list[list[Outgoing]]:
    """Split events into batches of one stream, bounded in number and bytes, in order."""
    batches: list[list[Outgoing]] = []
    num_bytes = 0
    for item in outgoing:
        num_bytes += len(item.data)
        is_full = not batches or (
            batches[-1][0].stream is not item.stream
            or len(batches[-1]) == BATCH_EVENTS_MAX
            or num_bytes > BATCH_BYTES_MAX
        )
        if is_full:
            batches.append([])
            num_bytes = len(item.data)
        batches[-1].append(item)
    return batches


def _batched(item: Outgoing, batch_id: str, n: int) -> dict[str, str]:
    return {**item.headers, "Nats-Batch-Id": batch_id, "Nats-Batch-Sequence": str(n)}


def _receipt(item: Outgoing, sequence: int, is_duplicate: bool) -> PublishReceipt:
    return PublishReceipt(stream=item.stream, sequence=sequence, is_duplicate=is_duplicate)


def _header_text(stored: dict[str, Any]) -> str:
    return base64.b64decode(stored.get("hdrs", "")).decode(errors="replace")
