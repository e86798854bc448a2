"""Reads the archive before a stream, for readers that do not know where the stream begins.

The archiver announces what it has archived (`LogArchived`) and removes it from the stream no
sooner than `PURGE_AFTER_S` later. Readers look for announcements more often than that, so they read
from the archive whatever the stream may lack by then.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable

from penstock.infra.bus.archive.segments import (
    ArchivedEvent,
    SegmentIndex,
    SegmentKey,
    read_index,
    read_segment,
    segment_keys,
)
from penstock.messages.base import Stream
from penstock.messages.bus import ObjectStore

log = logging.getLogger(__name__)

ARCHIVED = (Stream.FEEDBACK, Stream.SIGNALS, Stream.TRAJECTORIES, Stream.REWARDS)
"""Streams that grow with users and rollouts; the others grow with steps and starts."""
LOOK_S = 60.0
"""Time between two looks for announcements."""
PURGE_AFTER_S = 600.0
assert PURGE_AFTER_S > 2 * LOOK_S
NUM_INDEXES_MAX = 64
"""Indexes that are kept in memory, about 0.2 MB each."""


class Archive:
    """Read access to the archive of one run.

    Args:
        store: Object store of the run.
        announced: Returns the last archived sequence of a stream, 0 if there is none.

    """

    def __init__(self, store: ObjectStore, announced: Callable[[Stream], Awaitable[int]]) -> None:
        self._store, self._announced = store, announced
        self._ends: dict[Stream, tuple[float, int]] = {}
        """Stream -> when it was looked up, and the last archived sequence."""
        self._indexes: OrderedDict[str, SegmentIndex] = OrderedDict()

    async def end(self, stream: Stream) -> int:
        """Return the last archived sequence of a stream, at most a minute old."""
        if stream not in ARCHIVED:
            return 0
        now = asyncio.get_running_loop().time()
        looked_at, end = self._ends.get(stream, (now - LOOK_S, 0))
        if now - looked_at >= LOOK_S:
            end = max(end, await self._announced(stream))
            self._ends[stream] = now, end
        return end

    async def events(
        self, stream: Stream, after: int, types: set[str] | None = None
    ) -> AsyncIterator[ArchivedEvent]:
        """Yield the archived events after a sequence, of some types or of all, in order.

        Raises:
            CorruptDataError: A segment is damaged; the error names it.

        """
        end = await self.end(stream)
        if end <= after:
            return
        for key in await segment_keys(self._store, stream):
            if key.last <= after or key.first > end:
                continue
            if types is not None:
                newest = (await self._index(key)).newest
                if max((newest.get(name, 0) for name in types), default=0) <= after:
                    continue
            for event in await read_segment(self._store, key):
                if event.sequence > after and (types is None or event.type in types):
                    yield event

    async def newest(self, stream: Stream, event_type: str, subject: str) -> ArchivedEvent | None:
        """Return the newest archived event of a subject or, if that is empty, of a type."""
        if not await self.end(stream):
            return None
        for key in reversed(await segment_keys(self._store, stream)):
            index = await self._index(key)
            if event_type not in index.newest or (subject and not index.may_hold(subject)):
                continue
            for event in reversed(await read_segment(self._store, key)):
                if event.subject == subject or (not subject and event.type == event_type):
                    return event
        return None

    async def _index(self, key: SegmentKey) -> SegmentIndex:
        found = self._indexes.get(key.path)
        if found is None:
            found = self._indexes[key.path] = await read_index(self._store, key)
            if len(self._indexes) > NUM_INDEXES_MAX:
                self._indexes.popitem(last=False)
        self._indexes.move_to_end(key.path)
        return found
