"""Garbage collector of objects that no event references anymore.

A publisher deletes the objects of a refused event at once, and a client those of its calls. The
collector deletes the rest: objects of events that their streams dropped, and of writers that died
between storing the object and the event. The launcher of a run collects hourly and at the end;
`penstock log collect` does the same after streams were purged or trimmed by hand.
"""

import asyncio
import logging
import time
from collections.abc import Iterator

import msgspec

from penstock.infra.bus.archive.segments import read_index, segment_keys
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.jetstream.event_publisher import PUBLISH_S_MAX
from penstock.infra.bus.jetstream.log_reader import RawMessage
from penstock.messages.base import Event, Stream
from penstock.messages.bus import ObjectStore
from penstock.messages.codec import decode
from penstock.messages.control import MessageRejected
from penstock.messages.errors import CodecError, PenstockError
from penstock.messages.reading.claims import CLAIM_PREFIX, created_at
from penstock.messages.streams import STREAMS, Dedup

log = logging.getLogger(__name__)
COLLECT_S_MAX = 1800.0
GRACE_S = 3600.0
"""Age in seconds below which an unreferenced object is kept, since its event or the call that reads
it may be in flight. Far above `PUBLISH_S_MAX`, the deadlines of calls, and clock skew."""
assert GRACE_S > PUBLISH_S_MAX


class CollectionReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one collection."""

    num_deleted: int
    num_kept: int


class Collector:
    """Collects one run's objects, again and again: each time it reads what the log has since.

    Memory: one key per object that an event names.
    """

    def __init__(self, bus: NatsBus, store: ObjectStore) -> None:
        self._bus, self._store = bus, store
        self._read: dict[Stream, int] = {}
        """Last sequence read of each stream whose events stay, in the stream or in the archive."""
        self._named: set[str] = set()

    async def collect(self, *, now: float, grace_s: float = GRACE_S) -> CollectionReport:
        """Delete the run's unreferenced objects that are older than `grace_s`.

        Args:
            now: Unix seconds.
            grace_s: Age in seconds below which objects are kept; 0 only if nothing is writing.

        Raises:
            BusError: The log cannot be read; nothing is deleted.
            CorruptDataError: The archive cannot be read; nothing is deleted.
            StoreUnreachableError: The store does not answer.

        """
        # List objects before reading the log: an event stored meanwhile cannot reference any of
        # them.
        keys = await self._store.keys(CLAIM_PREFIX)
        self._named.intersection_update(keys)
        unnamed = {key for key in keys if created_at(key) <= now - grace_s}
        unnamed -= self._named
        if unnamed:
            for stream in Stream:
                await self._find_named(stream, unnamed)
        for key in sorted(unnamed):
            await self._store.delete(key)
        log.info("collected %d unreferenced objects of %d", len(unnamed), len(keys))
        return CollectionReport(num_deleted=len(unnamed), num_kept=len(keys) - len(unnamed))

    async def _find_named(self, stream: Stream, unnamed: set[str]) -> None:
        """Take out of `unnamed` what a stream or its archive references."""
        for segment in await segment_keys(self._store, stream):
            unnamed.difference_update((await read_index(self._store, segment)).object_keys)
        stays = STREAMS[stream].dedup is Dedup.SUBJECT and not STREAMS[stream].max_age_s
        after = max(self._read.get(stream, 0), await self._bus.archive.end(stream))
        async for stored in self._bus.read_stream(stream, after):
            found = set(named_objects(stored))
            unnamed -= found
            if stays:
                self._named |= found
                self._read[stream] = stored.sequence


async def collect(
    bus: NatsBus, store: ObjectStore, *, now: float, grace_s: float = GRACE_S
) -> CollectionReport:
    """Collect once; see `Collector.collect`."""
    return await Collector(bus, store).collect(now=now, grace_s=grace_s)


async def collect_if_possible(collector: Collector, *, grace_s: float = GRACE_S) -> None:
    """Collect now; on a failure, leave the objects to the next collection."""
    try:
        async with asyncio.timeout(COLLECT_S_MAX):
            await collector.collect(now=time.time(), grace_s=grace_s)
    except (PenstockError, OSError) as error:  # A TimeoutError is one.
        log.warning("unreferenced objects were not collected: %s", error)


def named_objects(stored: RawMessage) -> Iterator[str]:
    """Yield the keys that a stored message references: its own claim and those of its parts."""
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
