"""One version of the weights in memory, moved forward in place, whatever damage there is.

```
  shortest update path in the region's store; in the origin's where that falls short
       │
  object damaged or gone ─▶ fetched from the origin and put back ─▶ the origin has none (it was made
       │                                      in the region): drop its manifest, plan again
  digest wrong ─▶ which tiles? ─▶ fetched from the region's relay ─▶ failed: take a full snapshot
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
from penstock.actors.relay.core.repair import RepairError, refetch
from penstock.actors.relay.core.store_io import DamagedStoreError, for_each_shard, get_checked
from penstock.actors.runtime.context import Context
from penstock.kernels.delta import Patch
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError, NotFoundError
from penstock.messages.weights import ShardRef, SnapshotKind, WeightsPublished

_log = logging.getLogger(__name__)
_NUM_PLANS_MAX = 8
_TOUCHED_SHARE_MAX = 1 / 8
"""Above it, their indices (8 bytes each) take half the memory of the weights: all counts as
touched."""


class _UnusableError(Exception):
    """A manifest whose objects are damaged or gone everywhere, or that contradicts them."""

    def __init__(self, manifest: WeightsPublished) -> None:
        super().__init__(manifest)
        self.manifest = manifest


class WeightReplica:
    """Follows versions out of one region's store.

    At every return from `advance` the snapshot is that of the version, verified by its digest.
    """

    def __init__(self, local: ObjectStore, catalog: Catalog, region: str = "") -> None:
        """Args: `region` names the relay that repairs damaged tiles; empty for none."""
        self._local = local
        self._catalog = catalog
        self._region = region
        self._snapshot: FlatSnapshot | None = None
        self._manifest: WeightsPublished | None = None
        self._touched: list[np.ndarray] | None = []
        self._is_fresh = False
        self.num_mismatches = 0
        """Wrong digests so far."""

    @property
    def version(self) -> int:
        """The version held; NOTHING for none."""
        return NOTHING if self._manifest is None else self._manifest.policy_version

    @property
    def snapshot(self) -> FlatSnapshot:
        """The tensors held; they change when the replica advances."""
        assert self._snapshot is not None, "nothing was loaded yet"
        return self._snapshot

    @property
    def manifest(self) -> WeightsPublished:
        """The manifest of the version held."""
        assert self._manifest is not None, "nothing was loaded yet"
        return self._manifest

    def patches(self) -> dict[str, np.ndarray | Patch]:
        """Return what changed since `clear_changes`: overwrites, or every tensor whole."""
        if self._touched is None:
            return dict(self.snapshot.tensors)
        return dict(self.snapshot.patches(self._touched))

    def clear_changes(self) -> None:
        """Start to collect changes again: the engine holds this version now."""
        self._touched = []

    async def advance(self, target: int, ctx: Context) -> int:
        """Move to a version; return the bytes of the objects fetched.

        Raises:
            NotFoundError: Neither the region nor the origin holds an update path.
            DamagedStoreError: Damage that no other path avoids.
            CorruptDataError: The region holds no path, and the origin's head is damaged.

        """
        self._is_fresh = False
        if target < self.version:  # nothing leads back
            self._forget()
        num_read = 0
        for _ in range(_NUM_PLANS_MAX):
            path = await self._path(target, ctx)
            try:
                for manifest in path:
                    num_read += num_bytes(manifest)
                    await self._step(manifest, ctx)
            except _UnusableError as error:
                await self._drop(error.manifest)
            except RepairError as error:
                _log.warning("weights %d: starting from a full snapshot: %s", target, error)
                self._forget()
            else:
                return num_read
        raise DamagedStoreError(f"weights {target}: every update path is damaged")

    async def _path(self, target: int, ctx: Context) -> list[WeightsPublished]:
        if self.version == target:
            return []
        path = self._catalog.plan(self.version, target)
        if not path:
            path = (await Catalog.of_origin(ctx.store)).plan(self.version, target)
        if not path:
            raise NotFoundError(f"weights {target}: no update path from {self.version}")
        return path

    async def _step(self, manifest: WeightsPublished, ctx: Context) -> None:
        """Take one step of the path: decode all of it, then write, then verify."""
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
            _log.warning("weights %d: %s", manifest.policy_version, error)
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
        _log.warning("weights %d: the digest is %s", manifest.policy_version, digest)
        was_fresh = self._is_fresh
        try:
            if await self._repair(manifest, ctx):
                return
        except RepairError:
            if not was_fresh:
                raise
        self._forget()
        raise _UnusableError(manifest)

    async def _repair(self, manifest: WeightsPublished, ctx: Context) -> bool:
        """Fetch the tiles that differ from a version's; return False if none does.

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
        if not damaged:
            return False
        self.num_mismatches += 1
        version = manifest.policy_version
        await refetch(self.snapshot, version, table, damaged, region=self._region, ctx=ctx)
        return True

    async def _fetch(self, shard: ShardRef, ctx: Context) -> bytes:
        try:
            return await get_checked(self._local, shard)
        except (CorruptDataError, NotFoundError) as error:
            data = await get_checked(ctx.store, shard)
            _log.warning("weights: repaired from the origin: %s", error)
        await self._local.delete(shard.object_key)
        with suppress(OSError):  # no room: the next reader asks the origin again
            await self._local.put(shard.object_key, data)
        return data

    async def _drop(self, manifest: WeightsPublished) -> None:
        _log.warning("weights: dropping %s", manifest_key(manifest))
        self._catalog.discard(manifest)
        await self._local.delete(manifest_key(manifest))

    def _add_touched(self, touched: list[np.ndarray]) -> None:
        if self._touched is not None:
            self._touched += touched
            if sum(map(np.size, self._touched)) > _TOUCHED_SHARE_MAX * self.snapshot.num_params:
                self._touched = None

    def _forget(self) -> None:
        self._snapshot = self._manifest = self._touched = None
