"""Moves the older part of a run's log from the streams to the object store.

```
 stream half full ─▶ segments stored ─▶ LogArchived ──PURGE_AFTER_S──▶ purged from the stream
                        │ killed here: not announced, deleted and stored again
```
Each run has one archiver, in its launcher. If it is killed at any point nothing is lost: only
announced events are purged, and readers read each sequence once, from the archive or from the
stream.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from penstock.actors.runtime.snapshots.stored import oldest_positions
from penstock.infra.bus.archive.reading import ARCHIVED, PURGE_AFTER_S
from penstock.infra.bus.archive.segments import (
    ArchivedEvent,
    SegmentIndex,
    SegmentKey,
    read_index,
    read_segment,
    segment_keys,
    store_segment,
)
from penstock.infra.bus.collector import named_objects
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.settings import ArchiveSection
from penstock.messages.base import Stream
from penstock.messages.bus import ObjectStore
from penstock.messages.control import LogArchived
from penstock.messages.errors import PenstockError
from penstock.messages.streams import STREAMS, Retention

log = logging.getLogger(__name__)

ARCHIVE_S = 60.0
"""Time between two looks at the streams."""
ARCHIVE_S_MAX = 1800.0
SEGMENT_EVENTS = 20_000
SEGMENT_BYTES = 32 << 20
"""Size at which a segment ends: events, and bytes before compression."""
ALARMS = (0.8, 0.6)
"""Shares of its bound at which a stream is reported as filling up."""
LINEAGE_TYPES = frozenset({"LiveSampleJoined", "ErasureRequested", "ErasurePrepared", "UserErased"})
"""What is left of a segment when its retention ends."""


class Archiver:
    """Archives and purges the streams of one run, and reports how full they are."""

    def __init__(
        self,
        bus: NatsBus,
        store: ObjectStore,
        settings: ArchiveSection,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._bus, self._store, self._settings, self._now = bus, store, settings, now
        self._purged: dict[Stream, int] = {}
        self._alarms: dict[Stream, float] = {}

    async def look(self) -> None:
        """Do the due work of every stream.

        Raises:
            BusError: The server does not answer; the next call continues.
            OSError: The store refuses; nothing is purged.

        """
        for stream, spec in STREAMS.items():
            if spec.retention is Retention.LIMITS and not spec.in_memory:
                await self._look(stream)

    async def _look(self, stream: Stream) -> None:
        state, bytes_max = await self._bus.stream_state(stream)
        num_events, num_bytes = int(state["messages"]), int(state["bytes"])
        found = await self._bus.last(LogArchived, f"archive.{stream}")
        known = found.event if found and isinstance(found.event, LogArchived) else None
        self._warn(stream, num_bytes, bytes_max)
        last = known.last if known else 0
        if stream in ARCHIVED:
            if known and last > self._purged.get(stream, 0):
                await self._purge(stream, known)
            wanted = self._num_to_archive(num_events, num_bytes, bytes_max)
            # Not before the previous ones are purged, because they are still counted.
            if wanted and last == self._purged.get(stream, 0):
                last = await self._archive(stream, last, wanted)
            await self._end_retention(stream)
        share = num_bytes / bytes_max if bytes_max > 0 else 0.0
        shown = known.num_bytes / known.bytes_max if known and known.bytes_max > 0 else 0.0
        if abs(share - shown) >= 0.01 or (known is None and last):
            await self._announce(stream, last, known.at if known else self._now())

    def _num_to_archive(self, num_events: int, num_bytes: int, bytes_max: int) -> int:
        """Return how many of the oldest events to archive; 0 while there is room."""
        is_full = 0 < bytes_max < 2 * num_bytes
        if num_events <= self._settings.events_max and not is_full:
            return 0
        return max(num_events // 2, num_events - self._settings.events_max // 2)

    async def _archive(self, stream: Stream, last: int, wanted: int) -> int:
        """Archive up to `wanted` events after `last`; return the last that is archived now."""
        for key in await segment_keys(self._store, stream):
            if key.first > last:
                await self._delete(key)
        bound = await self._needed_after(stream)
        old_enough = self._now() - self._settings.age_s_min
        events: list[ArchivedEvent] = []
        objects: set[str] = set()
        num_bytes = 0
        async for stored in self._bus.read_stream(stream, last, fetches=False):
            is_wanted = wanted > 0 and stored.stored_at < old_enough
            if not is_wanted or (bound is not None and stored.sequence > bound):
                break
            wanted -= 1
            events.append(
                ArchivedEvent(
                    stream=stream,
                    sequence=stored.sequence,
                    subject=stored.subject,
                    stored_at=stored.stored_at,
                    data=stored.data,
                    is_claim=bool(stored.claim_key),
                )
            )
            objects.update(named_objects(stored))
            num_bytes += len(stored.data)
            if len(events) >= SEGMENT_EVENTS or num_bytes >= SEGMENT_BYTES:
                last = await self._store_segment(stream, events, objects)
                events, objects, num_bytes = [], set[str](), 0
        if events:
            last = await self._store_segment(stream, events, objects)
        return last

    async def _store_segment(
        self, stream: Stream, events: list[ArchivedEvent], objects: set[str]
    ) -> int:
        index = await store_segment(self._store, stream, events, object_keys=objects)
        await self._announce(stream, index.last, self._now())
        log.info("archived %s %d to %d, %d bytes", stream, index.first, index.last, index.num_bytes)
        return index.last

    async def _needed_after(self, stream: Stream) -> int | None:
        """Return the last sequence that no restart and no worker needs; None if all may go."""
        snapshots = (await oldest_positions(self._store)).values()
        bounds = [positions[stream] for positions in snapshots if stream in positions]
        acked = await self._bus.acked_to(stream)
        return min([*bounds, *([] if acked is None else [acked])], default=None)

    async def _purge(self, stream: Stream, known: LogArchived) -> None:
        """Purge what was announced long enough ago for every reader to have seen it."""
        if self._now() < known.at + PURGE_AFTER_S:
            return
        await self._bus.purge(stream, known.last)
        self._purged[stream] = known.last
        log.info("purged %s up to %d, which is in the archive", stream, known.last)

    async def _end_retention(self, stream: Stream) -> None:
        """Reduce the segments whose retention has ended to what lineage needs."""
        kept_s = self._settings.kept_s
        if not kept_s:
            return
        for key in await segment_keys(self._store, stream):
            index = await read_index(self._store, key)
            if index.is_reduced or index.last_at > self._now() - kept_s:
                continue
            await self._reduce(stream, key, index)

    async def _reduce(self, stream: Stream, key: SegmentKey, index: SegmentIndex) -> None:
        events = await read_segment(self._store, key)
        left = [event for event in events if event.type in LINEAGE_TYPES]
        if len(left) == len(events):
            return
        await store_segment(self._store, stream, left, object_keys=(), before=index)
        await self._delete(key)
        log.info("retention of %s %d to %d ended", stream, index.first, index.last)

    async def _delete(self, key: SegmentKey) -> None:
        # Delete the index first: without it, the rest is not a segment.
        await self._store.delete(f"{key.path}.index")
        await self._store.delete(f"{key.path}.log")

    async def _announce(self, stream: Stream, last: int, at: float) -> None:
        state, bytes_max = await self._bus.stream_state(stream)
        event = LogArchived(
            of=stream,
            last=last,
            num_bytes=int(state["bytes"]),
            bytes_max=max(0, bytes_max),
            num_events=int(state["messages"]),
            at=at,
        )
        await self._bus.publish([event])

    def _warn(self, stream: Stream, num_bytes: int, bytes_max: int) -> None:
        share = num_bytes / bytes_max if bytes_max > 0 else 0.0
        level = next((alarm for alarm in ALARMS if share >= alarm), 0.0)
        if level > self._alarms.get(stream, 0.0):
            log.warning(
                "stream %s holds %.0f%% of its %d bytes, and refuses events when it is full%s",
                *(stream, 100 * share, bytes_max),
                "" if stream in ARCHIVED else ": it is not archived, raise bus.max_bytes",
            )
        self._alarms[stream] = level


async def archive_if_possible(archiver: Archiver) -> None:
    """Archive now; leave failures to the next call."""
    try:
        async with asyncio.timeout(ARCHIVE_S_MAX):
            await archiver.look()
    except (PenstockError, OSError) as error:  # OSError includes TimeoutError.
        log.warning("the log was not archived: %s", error)
