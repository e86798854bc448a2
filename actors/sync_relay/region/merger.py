"""Makes merged deltas and full snapshots of one store's versions, from what that store holds."""

from collections.abc import Sequence

from penstock.actors.runtime.context import Context
from penstock.actors.sync_relay.core.catalog import Catalog
from penstock.actors.sync_relay.core.flat_snapshot import FlatSnapshot, cut
from penstock.actors.sync_relay.core.objects import ManifestHeader
from penstock.actors.sync_relay.core.store_io import StoreIO
from penstock.actors.sync_relay.publish.upload import store_version
from penstock.actors.sync_relay.region.retention import MERGE_EVERY, UpdateEdge
from penstock.actors.sync_relay.replica.weight_replica import WeightReplica
from penstock.messages.bus import ObjectStore
from penstock.messages.weights import SnapshotKind, WeightsPublished

_Base = tuple[FlatSnapshot, WeightsPublished]


class Merger:
    """The `UpdateBuilder` of a run; holds one snapshot in memory, two while it merges."""

    def __init__(self, local: ObjectStore, catalog: Catalog) -> None:
        self._local = local
        self._catalog = catalog
        self._weights = WeightReplica(local, catalog)

    async def make(self, edges: Sequence[UpdateEdge], ctx: Context) -> None:
        """Make updates to one version; see `UpdateBuilder.make`."""
        version = edges[0].policy_version
        short = [edge for edge in edges if edge.base_version == version - MERGE_EVERY]
        base: _Base | None = None
        if short:  # the replica passes its base on the path to the version
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
        )
        io = StoreIO(self._local, ctx.sleep, ctx.offload)
        made = await store_version(io, header, base[0] if base else None, flat, cut(flat.table))
        self._catalog.add(made)
