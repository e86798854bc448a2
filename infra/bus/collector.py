"""Deletes the objects that no event names any more: a done command's, a trimmed event's.

Who stores an object for an event that is then refused deletes it at once, and a client those of its
calls; the collector has what is left: events that their streams dropped, and writers that died
between object and event. A run's launcher is its owner, hourly and at the end of the run; `penstock
log collect` does the same for a run whose streams were purged or trimmed by hand.
"""

import asyncio
import logging
import time
from collections.abc import Iterator

import msgspec

from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.jetstream.event_publisher import PUBLISH_S_MAX
from penstock.infra.bus.jetstream.log_reader import RawMessage
from penstock.messages.base import Event, Stream
from penstock.messages.bus import ObjectStore
from penstock.messages.codec import decode
from penstock.messages.control import MessageRejected
from penstock.messages.errors import CodecError, PenstockError
from penstock.messages.reading.claims import CLAIM_PREFIX, created_at

log = logging.getLogger(__name__)
COLLECT_S_MAX = 1800.0
GRACE_S = 3600.0
"""Age below which an object is kept though nothing names it: its event may be on its way, or a call
that reads it. Far above both (`PUBLISH_S_MAX`, deadlines of calls) and the skew of clocks."""
assert GRACE_S > PUBLISH_S_MAX


class CollectionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection did."""

    num_deleted: int
    num_kept: int


async def collect(
    bus: NatsBus, store: ObjectStore, *, now: float, grace_s: float = GRACE_S
) -> CollectionReport:
    """Delete a run's unreferenced objects that are older than `grace_s`.

    Objects are listed before the log is read, so an event that is stored meanwhile names none of
    those that may be deleted. Memory: one key per old object.

    Args:
        bus: the run's log, all of whose streams are read.
        store: its objects; those without the claims' prefix are other owners'.
        now: unix seconds.
        grace_s: 0 only where nobody writes.

    Raises:
        BusError: the log cannot be read; nothing is deleted.
        StoreUnreachableError: the store does not answer.

    """
    keys = await store.keys(CLAIM_PREFIX)
    unnamed = {key for key in keys if created_at(key) <= now - grace_s}
    if unnamed:
        async for stored in bus.read_raw(list(Stream)):
            unnamed.difference_update(_named(stored))
    for key in sorted(unnamed):
        await store.delete(key)
    return CollectionReport(num_deleted=len(unnamed), num_kept=len(keys) - len(unnamed))


async def collect_if_possible(
    bus: NatsBus, store: ObjectStore, *, grace_s: float = GRACE_S
) -> None:
    """Collect now; what servers or store do not allow is left to the next collection."""
    try:
        async with asyncio.timeout(COLLECT_S_MAX):
            await collect(bus, store, now=time.time(), grace_s=grace_s)
    except (PenstockError, OSError) as error:  # A TimeoutError is one.
        log.warning("objects that no event names were not collected: %s", error)


def _named(stored: RawMessage) -> Iterator[str]:
    """Yield the objects that a stored message needs, its own claim and those of its parts."""
    if stored.claim_key:
        yield stored.claim_key
    yield from _keys_in(stored.data)


def _keys_in(data: bytes) -> Iterator[str]:
    try:
        message = decode(data)
    except CodecError:
        return
    if isinstance(message, Event):
        yield from message.object_keys()
    if isinstance(message, MessageRejected) and message.data != data:
        yield from _keys_in(message.data)
