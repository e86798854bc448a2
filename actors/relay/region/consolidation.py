"""Bounds the size of a store: makes merged deltas and full snapshots, deletes what they replace.

A late joiner fetches a full snapshot, then merged deltas and deltas, without any upload by the
trainer. `retention.py` decides which updates are made and kept; `Merger` makes them.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, Protocol

from penstock.actors.relay.core.catalog import Catalog
from penstock.actors.relay.core.flat_snapshot import FlatSnapshot, cut
from penstock.actors.relay.core.leases import leased_versions
from penstock.actors.relay.core.objects import PREFIX, ManifestHeader, is_manifest
from penstock.actors.relay.core.pins import Pins
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.publisher import store_version
from penstock.actors.relay.region.retention import (
    MERGE_EVERY,
    UpdateEdge,
    due,
    edge_of,
    floor,
    is_kept,
)
from penstock.actors.relay.replica.weight_replica import WeightReplica
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.messages.base import Event
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import StoreFullError
from penstock.messages.generation import ChannelMoved
from penstock.messages.reward import EvalAnnounced, EvalCompleted
from penstock.messages.weights import SnapshotKind, WeightsPublished

log = logging.getLogger(__name__)


class UpdateBuilder(Protocol):
    """Builder of merged deltas and full snapshots from a store's versions."""

    async def make(self, edges: Sequence[UpdateEdge], ctx: Context) -> None:
        """Store updates to one version, and add them to the catalog.

        Raises:
            OSError: The store has no room, after several attempts.
            DamagedStoreError: No undamaged update path leads to a version.

        """
        ...


MakeBuilder = Callable[[ObjectStore, Catalog], UpdateBuilder]


class Consolidation:
    """The consolidation of one store."""

    def __init__(self, local: ObjectStore, catalog: Catalog, make_builder: MakeBuilder) -> None:
        self._local = local
        self._catalog = catalog
        self._builder = make_builder(local, catalog)

    async def advance(self, newest: int, ctx: Context, *, needed: Collection[int] = ()) -> None:
        """Make the updates that are due up to the newest version, then delete obsolete objects.

        Args:
            newest: Newest version that the store holds.
            ctx: Context of the actor.
            needed: Versions to keep in addition to the leased ones.

        Raises:
            OSError: The store has no room, after several attempts.
            DamagedStoreError: No undamaged update path leads to a version.

        """
        edges = due(self._catalog.manifests, newest)
        # In order of version, so that the builder's copy only ever moves forward.
        for version in sorted({edge.policy_version for edge in edges}):
            await self._builder.make([e for e in edges if e.policy_version == version], ctx)
        if edges:
            await self.collect(ctx, needed=needed)

    async def collect(self, ctx: Context, *, needed: Collection[int] = ()) -> None:
        """Delete the objects of updates from before the oldest version to keep."""
        leased = await leased_versions(self._local, ctx.now())
        oldest = floor(self._catalog.manifests, {*leased, *needed})
        if oldest <= 0:
            return
        # By key instead of by manifest, so that leftovers of failed uploads are deleted, too.
        keys = [key for key in await self._local.keys(PREFIX) if _is_old(key, oldest)]
        # Manifests first: a reader must not find a manifest whose objects are gone.
        for key in sorted(keys, key=lambda key: not is_manifest(key)):
            await self._local.delete(key)
        for manifest in self._catalog.manifests:
            if not is_kept(edge_of(manifest), oldest):
                self._catalog.discard(manifest)
        log.info("deleted %d objects from before version %d", len(keys), oldest)


class ConsolidatingActor(Actor):
    """An actor that consolidates one store, in which it keeps all pinned versions."""

    follows: ClassVar[tuple[type[Event], ...]] = (
        WeightsPublished,
        EvalAnnounced,
        EvalCompleted,
        ChannelMoved,
    )
    _consolidation: Consolidation

    def __init__(self, pinned: Collection[int]) -> None:
        """Initialize with the versions to keep permanently, which some replicas stay at."""
        self._pinned = frozenset(pinned)
        self._pins = Pins()

    async def on_eval_announced(self, event: EvalAnnounced, ctx: Context) -> Effects:
        """Pin the version of an evaluation."""
        self._pins.announced(event)
        return ()

    async def on_eval_completed(self, event: EvalCompleted, ctx: Context) -> Effects:
        """Unpin the version of an evaluation."""
        self._pins.completed(event.eval_id)
        return ()

    async def on_channel_moved(self, event: ChannelMoved, ctx: Context) -> Effects:
        """Pin the versions that channels point to."""
        self._pins.moved(event)
        return ()

    async def _consolidate(self, newest: int, named: Collection[int], ctx: Context) -> None:
        """Consolidate the store; if there is no room for merged deltas, try at the next version."""
        needed = {*named, *self._pinned, *self._pins.versions}
        try:
            await self._consolidation.advance(newest, ctx, needed=needed)
        except StoreFullError as error:
            log.warning("version %d: no room for merged deltas: %s", newest, error)


def _is_old(key: str, oldest: int) -> bool:
    version, _, rest = key.removeprefix(PREFIX).partition("/")
    # Slots of the head are under the same prefix; the head deletes its own.
    if not version.isdigit():
        return False
    kind, _, base = rest.partition("/")[0].partition("-")
    if kind not in SnapshotKind.__members__.values():
        return False
    base_version = int(base) if base else int(version) - 1
    return not is_kept(UpdateEdge(int(version), SnapshotKind(kind), base_version), oldest)


_Base = tuple[FlatSnapshot, WeightsPublished]


class Merger:
    """The `UpdateBuilder` of real runs; holds one snapshot in memory, and two while it merges."""

    def __init__(self, local: ObjectStore, catalog: Catalog) -> None:
        self._local = local
        self._catalog = catalog
        self._weights = WeightReplica(local, catalog)

    async def make(self, edges: Sequence[UpdateEdge], ctx: Context) -> None:
        """Store updates to one version; see `UpdateBuilder.make`."""
        version = edges[0].policy_version
        short = [edge for edge in edges if edge.base_version == version - MERGE_EVERY]
        base: _Base | None = None
        # The base of the shortest merge is on the replica's own path to the version: copy it in
        # passing instead of building it from the start.
        if short:
            await self._weights.advance(version - MERGE_EVERY, ctx)
            base = self._weights.snapshot.copy(), self._weights.manifest
        await self._weights.advance(version, ctx)
        self._weights.clear_changes()
        for edge in edges:
            if edge.kind is SnapshotKind.FULL:
                base = None
            elif edge not in short:
                older = WeightReplica(self._local, self._catalog)
                await older.advance(edge.base_version, ctx)
                base = older.snapshot, older.manifest
            await self._store(edge, base, ctx)

    async def _store(self, edge: UpdateEdge, base: _Base | None, ctx: Context) -> None:
        manifest, flat = self._weights.manifest, self._weights.snapshot
        header = ManifestHeader(
            policy_version=edge.policy_version,
            base_version=edge.base_version,
            kind=edge.kind,
            optimizer_step=manifest.optimizer_step,
            fencing_token=manifest.fencing_token,
            base_root_digest=base[1].target_root_digest if base else "",
            base_element_digest=base[1].target_element_digest if base else "",
            probe=manifest.probe,
        )
        io = StoreIO(self._local, ctx.sleep, ctx.offload)
        made = await store_version(io, header, base[0] if base else None, flat, cut(flat.table))
        log.info("made %s of version %d from %d", edge.kind, edge.policy_version, edge.base_version)
        self._catalog.add(made)
