"""Reads the log into a fold: the newest snapshot, then history in time order, then live events.

```
 snapshot ─▶ positions ─▶ history, all streams by time ─▶ caught up ─▶ live, each stream in order
                                          every so many events: the next snapshot
```
History is merged by storage time, so a fold sees events in the order in which a running one saw
them: its conclusions from two streams do not depend on which is read faster.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from penstock.actors.runtime.snapshots.state_tree import attributes_of
from penstock.actors.runtime.snapshots.stored import (
    SNAPSHOT_FORMAT,
    SnapshotHead,
    pack_state,
    read_head,
    read_snapshot,
    store_snapshot,
    stored_snapshots,
    unpack_state,
)
from penstock.messages.base import Event, Stream
from penstock.messages.bus import Bus, Delivery, ObjectStore
from penstock.messages.errors import CodecError, CorruptDataError, FormatError, NotFoundError
from penstock.messages.streams import STREAMS

log = logging.getLogger(__name__)

SAVE_EVENTS = 10_000
"""Durable events between two snapshots; a restart reads so many again, in seconds."""
SAVE_SHARE_MAX = 0.02
"""Largest share of time spent on snapshots: a large state is saved less often."""
NUM_BEHIND_MAX = 256
"""A reading of history that found at most so many events has caught up."""


class SavedFold(Protocol):
    """State to save; see the fields of `Actor`."""

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of the attributes that form the state."""
        ...

    @property
    def snapshot_version(self) -> int:
        """Version of the rules by which events change the state."""
        ...

    def mark(self) -> int:
        """Return the position that a snapshot must not be ahead of."""
        ...

    def can_save(self) -> bool:
        """Return whether the state may be saved now."""
        ...

    def restored(self) -> None:
        """Recompute what is derived from the state."""
        ...


Offload = Callable[..., Awaitable[Any]]


class FoldKeeper:
    """Positions and snapshots of one fold."""

    def __init__(
        self,
        fold: SavedFold,
        name: str,
        store: ObjectStore,
        monotonic: Callable[[], float],
        offload: Offload,
    ) -> None:
        self._fold, self._name, self._store = fold, name, store
        self._monotonic, self._offload = monotonic, offload
        self._num_events = 0
        self._num_saved = 0
        self._next_at = 0.0
        """Monotonic time before which no snapshot is made."""
        self.positions: dict[Stream, int] = {}

    async def restore(self) -> None:
        """Fill the fold from its newest sound snapshot that is not ahead of its mark."""
        for key in await stored_snapshots(self._store, self._name):
            try:
                data = await read_snapshot(self._store, key)
                head = await self._offload(self._fill, data, key)
            except (CorruptDataError, CodecError, FormatError, NotFoundError) as error:
                log.warning("not starting from %s: %s", key, error)
                continue
            if head is not None:
                self.positions, self._num_events = dict(head.positions), head.num_events
                self._num_saved = head.num_events
                log.info("starting from %s, of %d events", key, head.num_events)
                return
        log.info("no snapshot: starting from the whole log")

    def _fill(self, data: bytes, key: str) -> SnapshotHead | None:
        head, _ = read_head(data, key)
        if head.mark > self._fold.mark():
            log.info("not starting from %s: it is ahead, at %d", key, head.mark)
            return None
        version = self._fold.snapshot_version
        head, filled = unpack_state(data, self._roots(), fold=self._name, version=version, what=key)
        for name, value in filled.items():
            setattr(self._fold, name, value)
        self._fold.restored()
        return head

    def _roots(self) -> dict[str, Any]:
        return {name: getattr(self._fold, name) for name in attributes_of(self._fold)}

    def note(self, delivery: Delivery) -> None:
        """Record that the fold has applied an event."""
        self.positions[delivery.stream] = delivery.sequence
        # Telemetry expires within minutes, so reading it again is cheap.
        self._num_events += not STREAMS[delivery.stream].in_memory

    @property
    def is_due(self) -> bool:
        """Whether the fold should be saved now."""
        is_time = self._num_events - self._num_saved >= SAVE_EVENTS
        return is_time and self._monotonic() >= self._next_at and self._fold.can_save()

    async def save(self) -> None:
        """Store a snapshot. The fold must not change meanwhile.

        If the store refuses it, the next start takes longer; the actor continues.
        """
        started = self._monotonic()
        head = SnapshotHead(
            format=SNAPSHOT_FORMAT,
            fold=self._name,
            version=self._fold.snapshot_version,
            positions=dict(self.positions),
            num_events=self._num_events,
            mark=self._fold.mark(),
        )
        try:
            data = await self._offload(pack_state, self._roots(), head)
            await store_snapshot(self._store, self._name, data, self._num_events)
        except OSError as error:
            log.warning("no snapshot after %d events: %s", self._num_events, error)
        else:
            log.info("saved a snapshot after %d events, %d bytes", self._num_events, len(data))
        self._num_saved = self._num_events
        now = self._monotonic()
        self._next_at = now + (now - started) / SAVE_SHARE_MAX


async def followed(
    bus: Bus,
    types: Sequence[type[Event]],
    after: Mapping[Stream, int],
    on_caught_up: Callable[[], None],
) -> AsyncGenerator[Delivery, None]:
    """Yield the log after these positions: history in time order, then live events."""
    position = dict(after)
    num_read = NUM_BEHIND_MAX + 1
    while num_read > NUM_BEHIND_MAX:
        num_read = 0
        async with aclosing(bus.follow(types, after=position, stop_at_end=True)) as history:
            async for delivery in history:
                position[delivery.stream] = delivery.sequence
                num_read += 1
                yield delivery
    on_caught_up()
    async with aclosing(bus.follow(types, after=position)) as live:
        async for delivery in live:
            yield delivery
