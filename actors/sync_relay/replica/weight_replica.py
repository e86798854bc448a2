"""One version of the weights in memory, moved forward in place, through whatever damage there is.

```
     way = cheapest chain, folds or anchor in the region; the origin's where that falls short
       │
  object damaged or gone ─▶ fetched from the origin and put back ─▶ not there, as it was made in
       │                                              the region: drop its manifest, plan again
  digest wrong ─▶ which tiles? ─▶ fetched from the region's relay ─▶ that fails: from an anchor
                       └─ none: the manifest contradicts its objects: drop it, plan again
```
"""

import logging
from contextlib import suppress

import numpy as np

from penstock.actors.runtime.context import Context
from penstock.actors.sync_relay.core.catalog import NOTHING, Catalog, num_bytes
from penstock.actors.sync_relay.core.digests import decode_table
from penstock.actors.sync_relay.core.flat_snapshot import Image
from penstock.actors.sync_relay.core.objects import apply_version, begin_anchor, manifest_key
from penstock.actors.sync_relay.core.repair import RepairError, refetch
from penstock.actors.sync_relay.core.transfer import DamagedStoreError, get_checked, over_shards
from penstock.kernels.delta import Patch
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError, NotFoundError
from penstock.messages.weights import ShardRef, SnapshotKind, WeightsPublished

_log = logging.getLogger(__name__)
_NUM_PLANS_MAX = 8
_TOUCHED_SHARE_MAX = 1 / 8
"""Above, their places (8 bytes each) take half the memory of the weights: all counts as touched."""


class _UnusableError(Exception):
    """A manifest whose objects are damaged or gone everywhere, or that contradicts them."""

    def __init__(self, manifest: WeightsPublished) -> None:
        super().__init__(manifest)
        self.manifest = manifest


class Mirror:
    """Follows versions out of one region's store.

    At every return from `advance` the image is that of the version, proved by its digest.
    """

    def __init__(self, local: ObjectStore, catalog: Catalog, region: str = "") -> None:
        """Args: `region` names the relay to ask for damaged tiles; empty: nobody."""
        self._local = local
        self._catalog = catalog
        self._region = region
        self._image: Image | None = None
        self._manifest: WeightsPublished | None = None
        self._touched: list[np.ndarray] | None = []
        self._is_fresh = False
        self.num_mismatches = 0
        """Digests that were wrong on the way."""

    @property
    def version(self) -> int:
        """Return the version at hand; NOTHING for none."""
        return NOTHING if self._manifest is None else self._manifest.policy_version

    @property
    def image(self) -> Image:
        """Return what is at hand; it moves with the mirror."""
        assert self._image is not None, "nothing was loaded yet"
        return self._image

    @property
    def manifest(self) -> WeightsPublished:
        """Return the manifest of the version at hand."""
        assert self._manifest is not None, "nothing was loaded yet"
        return self._manifest

    def patches(self) -> dict[str, np.ndarray | Patch]:
        """Return what changed since `settle`: overwrites, or every tensor whole."""
        if self._touched is None:
            return dict(self.image.tensors)
        return dict(self.image.patches(self._touched))

    def settle(self) -> None:
        """Begin to collect changes again: somebody else holds this version now."""
        self._touched = []

    async def advance(self, target: int, ctx: Context) -> int:
        """Go to a version; return the bytes of the objects it took.

        Raises:
            NotFoundError: neither the region nor the origin holds a way.
            DamagedStoreError: damage that no other way goes around.
            CorruptDataError: the region holds no way, and the origin's head is damaged.

        """
        self._is_fresh = False
        if target < self.version:  # nothing leads back
            self._forget()
        num_read = 0
        for _ in range(_NUM_PLANS_MAX):
            way = await self._way(target, ctx)
            try:
                for manifest in way:
                    num_read += num_bytes(manifest)
                    await self._step(manifest, ctx)
            except _UnusableError as error:
                await self._drop(error.manifest)
            except RepairError as error:
                _log.warning("weights %d: starting from an anchor: %s", target, error)
                self._forget()
            else:
                return num_read
        raise DamagedStoreError(f"weights {target}: no undamaged way after {_NUM_PLANS_MAX} plans")

    async def _way(self, target: int, ctx: Context) -> list[WeightsPublished]:
        if self.version == target:
            return []
        way = self._catalog.plan(self.version, target)
        if not way:
            way = (await Catalog.of_origin(ctx.store)).plan(self.version, target)
        if not way:
            raise NotFoundError(f"weights {target}: no way from {self.version} in region or origin")
        return way

    async def _step(self, manifest: WeightsPublished, ctx: Context) -> None:
        """Take one edge: decode all of it, then write, then prove."""
        try:
            payloads = await over_shards(lambda shard: self._fetch(shard, ctx), manifest.shards)
        except (CorruptDataError, NotFoundError) as error:
            raise _UnusableError(manifest) from error
        if manifest.kind is SnapshotKind.ANCHOR:
            self._forget()
            try:
                self._image, payloads = begin_anchor(manifest, payloads)
            except CorruptDataError as error:
                raise _UnusableError(manifest) from error
            self._is_fresh = True
        try:
            write = await ctx.offload(apply_version, self.image, manifest, payloads)
        except CorruptDataError as error:
            _log.warning("weights %d: %s", manifest.policy_version, error)
            if self._manifest is None or not await self._mend(self._manifest, ctx):
                raise _UnusableError(manifest) from error
            write = await ctx.offload(apply_version, self.image, manifest, payloads)
        self._note(await ctx.offload(write))
        await self._prove(manifest, ctx)

    async def _prove(self, manifest: WeightsPublished, ctx: Context) -> None:
        self._manifest = manifest
        digest = await ctx.offload(self.image.digest)
        if digest == manifest.target_root_digest:
            return
        _log.warning("weights %d: the digest is %s", manifest.policy_version, digest)
        was_fresh = self._is_fresh
        try:
            if await self._mend(manifest, ctx):
                return
        except RepairError:
            if not was_fresh:
                raise
        self._forget()
        raise _UnusableError(manifest)

    async def _mend(self, manifest: WeightsPublished, ctx: Context) -> bool:
        """Fetch again the tiles that are not a version's; False where all of them are.

        Raises:
            RepairError: something is wrong that could not be mended.

        """
        if manifest.digests is None:
            raise RepairError(f"weights {manifest.policy_version}: no table of digests")
        try:
            data = await self._fetch(manifest.digests, ctx)
            table = decode_table(data, manifest.target_root_digest)
        except (CorruptDataError, NotFoundError) as error:
            self.num_mismatches += 1
            raise RepairError(str(error)) from error
        damaged = await ctx.offload(table.damaged_tiles, self.image.tensors)
        if not damaged:
            return False
        self.num_mismatches += 1
        version = manifest.policy_version
        await refetch(self.image, version, table, damaged, region=self._region, ctx=ctx)
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

    def _note(self, touched: list[np.ndarray]) -> None:
        if self._touched is not None:
            self._touched += touched
            if sum(map(np.size, self._touched)) > _TOUCHED_SHARE_MAX * self.image.num_params:
                self._touched = None

    def _forget(self) -> None:
        self._image = self._manifest = self._touched = None
