"""One copy of the weights in memory, which moves forward in place and recovers from damage.

```
  shortest update path in the region's store, or in the origin if the region has none
       │
  object damaged or gone ─▶ fetch it from the origin ─▶ the origin has none (it was made in
       │                    and put it back             the region): drop its manifest, plan again
  digest wrong ─▶ which tiles? ─▶ fetch them from the region's relay ─▶ failed: full snapshot
                       └─ none: the manifest contradicts its objects: drop it, plan again
```
"""

import logging
from contextlib import suppress

import numpy as np

from penstock.actors.relay.core.catalog import NOTHING, Catalog, num_bytes
from penstock.actors.relay.core.digests import decode_table
from penstock.actors.relay.core.flat_snapshot import FlatSnapshot
from penstock.actors.relay.core.objects import apply_version, begin_full_snapshot, manifest_key
from penstock.actors.relay.core.repair import RepairError, refetch_tiles
from penstock.actors.relay.core.store_io import DamagedStoreError, for_each_shard, get_checked
from penstock.actors.runtime.context import Context
from penstock.kernels.delta import Patch
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError, NotFoundError
from penstock.messages.weights import ShardRef, SnapshotKind, WeightsPublished

log = logging.getLogger(__name__)
_NUM_PLANS_MAX = 8
"""Largest number of update paths that are tried."""
_TOUCHED_SHARE_MAX = 1 / 8
"""Largest share of elements whose changes are recorded; above it, their indices (8 bytes each) take
half the memory of the weights, and all elements count as changed."""


class _UnusableError(Exception):
    """An update cannot be used: its objects are damaged or gone, or contradict the manifest."""

    def __init__(self, manifest: WeightsPublished) -> None:
        super().__init__(manifest)
        self.manifest = manifest


class WeightReplica:
    """A copy of the weights that follows the versions in one region's store.

    Whenever `advance` returns, the snapshot is that of the version, verified by its digest.
    """

    def __init__(self, local: ObjectStore, catalog: Catalog, region: str = "") -> None:
        """Initialize without weights.

        Args:
            local: Store of the region.
            catalog: Catalog of that store.
            region: Region whose relay repairs damaged tiles; empty for none.

        """
        self._local = local
        self._catalog = catalog
        self._region = region
        self._snapshot: FlatSnapshot | None = None
        self._manifest: WeightsPublished | None = None
        self._touched: list[np.ndarray] | None = []
        self._is_fresh = False
        self.num_mismatches = 0
        """Number of wrong digests so far."""

    @property
    def version(self) -> int:
        """Version held; NOTHING for none."""
        return NOTHING if self._manifest is None else self._manifest.policy_version

    @property
    def snapshot(self) -> FlatSnapshot:
        """Tensors held; they change when the replica advances."""
        assert self._snapshot is not None, "nothing was loaded yet"
        return self._snapshot

    @property
    def manifest(self) -> WeightsPublished:
        """Manifest of the version held."""
        assert self._manifest is not None, "nothing was loaded yet"
        return self._manifest

    def patches(self) -> dict[str, np.ndarray | Patch]:
        """Return the changes since `clear_changes`, as overwrites or as whole tensors."""
        if self._touched is None:
            return dict(self.snapshot.tensors)
        return dict(self.snapshot.patches(self._touched))

    def clear_changes(self) -> None:
        """Forget the changes so far, because the engine holds this version now."""
        self._touched = []

    async def advance(self, target: int, ctx: Context) -> int:
        """Move to a version; return the bytes of the objects fetched.

        Raises:
            NotFoundError: Neither the region nor the origin holds an update path.
            DamagedStoreError: Every update path is damaged.
            CorruptDataError: The region holds no path, and the origin's head is damaged.

        """
        self._is_fresh = False
        # No update leads back: start from a full snapshot.
        if target < self.version:
            self._forget()
        num_read = 0
        # Each failure drops an update from the catalog or the damaged copy, so that the next plan
        # differs.
        for _ in range(_NUM_PLANS_MAX):
            path = await self._path(target, ctx)
            try:
                for manifest in path:
                    num_read += num_bytes(manifest)
                    await self._step(manifest, ctx)
            except _UnusableError as error:
                await self._drop(error.manifest)
            except RepairError as error:
                log.warning("weights %d: starting from a full snapshot: %s", target, error)
                self._forget()
            else:
                return num_read
        raise DamagedStoreError(f"weights {target}: every update path is damaged")

    async def _path(self, target: int, ctx: Context) -> list[WeightsPublished]:
        if self.version == target:
            return []
        path = self._catalog.plan(self.version, target)
        # The origin may keep versions that the region has deleted.
        if not path:
            path = (await Catalog.of_origin(ctx.store)).plan(self.version, target)
        if not path:
            raise NotFoundError(f"weights {target}: no update path from version {self.version}")
        return path

    async def _step(self, manifest: WeightsPublished, ctx: Context) -> None:
        """Apply one update of the path: decode all of it, then write, then verify."""
        try:
            payloads = await for_each_shard(lambda shard: self._fetch(shard, ctx), manifest.shards)
        except (CorruptDataError, NotFoundError) as error:
            raise _UnusableError(manifest) from error
        if manifest.kind is SnapshotKind.FULL:
            self._forget()
            try:
                self._snapshot, payloads = begin_full_snapshot(manifest, payloads)
            except CorruptDataError as error:
                raise _UnusableError(manifest) from error
            self._is_fresh = True
        try:
            write = await ctx.offload(apply_version, self.snapshot, manifest, payloads)
        except CorruptDataError as error:
            log.warning("weights %d: %s", manifest.policy_version, error)
            # The delta does not fit its base. Either the copy in memory is damaged, which a repair
            # of the present version finds, or the update is.
            if self._manifest is None or not await self._repair(self._manifest, ctx):
                raise _UnusableError(manifest) from error
            write = await ctx.offload(apply_version, self.snapshot, manifest, payloads)
        self._add_touched(await ctx.offload(write))
        await self._verify(manifest, ctx)

    async def _verify(self, manifest: WeightsPublished, ctx: Context) -> None:
        self._manifest = manifest
        digest = await ctx.offload(self.snapshot.digest)
        if digest == manifest.target_root_digest:
            return
        log.warning(
            "weights %d: expected digest %s, got %s",
            manifest.policy_version,
            manifest.target_root_digest,
            digest,
        )
        was_fresh = self._is_fresh
        try:
            if await self._repair(manifest, ctx):
                return
        except RepairError:
            # `advance` starts from a full snapshot then; if this was one, it is unusable itself.
            if not was_fresh:
                raise
        self._forget()
        raise _UnusableError(manifest)

    async def _repair(self, manifest: WeightsPublished, ctx: Context) -> bool:
        """Replace the tiles that differ from a version's digests; return False if none differs.

        Raises:
            RepairError: The damage could not be repaired.

        """
        if manifest.digests is None:
            raise RepairError(f"weights {manifest.policy_version}: no table of digests")
        try:
            data = await self._fetch(manifest.digests, ctx)
            table = decode_table(data, manifest.target_root_digest)
        except (CorruptDataError, NotFoundError) as error:
            self.num_mismatches += 1
            raise RepairError(str(error)) from error
        damaged = await ctx.offload(table.damaged_tiles, self.snapshot.tensors)
        # The copy is what the table says, so the update is wrong and not the copy.
        if not damaged:
            return False
        self.num_mismatches += 1
        version = manifest.policy_version
        await refetch_tiles(self.snapshot, version, table, damaged, region=self._region, ctx=ctx)
        return True

    async def _fetch(self, shard: ShardRef, ctx: Context) -> bytes:
        try:
            return await get_checked(self._local, shard)
        except (CorruptDataError, NotFoundError) as error:
            data = await get_checked(ctx.store, shard)
            log.warning("weights: repaired from the origin: %s", error)
        # Puts refuse to overwrite, so the damaged object goes first.
        await self._local.delete(shard.object_key)
        # Without room the object stays absent, and the next reader asks the origin again.
        with suppress(OSError):
            await self._local.put(shard.object_key, data)
        return data

    async def _drop(self, manifest: WeightsPublished) -> None:
        log.warning("weights: dropping unusable update %s", manifest_key(manifest))
        self._catalog.discard(manifest)
        await self._local.delete(manifest_key(manifest))

    def _add_touched(self, touched: list[np.ndarray]) -> None:
        if self._touched is not None:
            self._touched += touched
            if sum(map(np.size, self._touched)) > _TOUCHED_SHARE_MAX * self.snapshot.num_params:
                self._touched = None

    def _forget(self) -> None:
        self._snapshot = self._manifest = self._touched = None
