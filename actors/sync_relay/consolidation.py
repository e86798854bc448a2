"""Folds and anchors made in the region, and the deletion of what they make needless.

```
 0 ─ 1 ─ ... ─ 8 ─ ... ─ 16 ─ ... ─ 24 ─ ... ─ 32 ─ 33          deltas, from the origin
 └──── fold ───┴── fold ──┴── fold ──┴── fold ──┘               every 8: half the chain's bytes
 anchor                                        anchor           every 32; the newest two are kept
```
A late joiner takes an anchor, the folds and the deltas after it. What leads to no version newer
than the older kept anchor is deleted: a replica that far behind takes that anchor.
"""

from penstock.actors.runtime.context import Context
from penstock.actors.sync_relay.catalog import NOTHING, Catalog
from penstock.actors.sync_relay.image import Image
from penstock.actors.sync_relay.loading import Loader
from penstock.actors.sync_relay.objects import PREFIX, Origin, pack_version
from penstock.actors.sync_relay.transfer import replace_version
from penstock.messages.bus import ObjectStore
from penstock.messages.weights import SnapshotKind, WeightsPublished

FOLD_EVERY = 8
ANCHOR_EVERY = 32
_NUM_ANCHORS_KEPT = 2


class Consolidation:
    """Keeps one region's store short and self-sufficient; holds one image in memory."""

    def __init__(self, local: ObjectStore, catalog: Catalog) -> None:
        self._local = local
        self._catalog = catalog
        self._loader = Loader(local, catalog)
        self._image: Image | None = None
        self._version = NOTHING

    @property
    def oldest_version(self) -> int:
        """Return the version of the oldest anchor that is kept."""
        kept = self._catalog.anchor_versions()[-_NUM_ANCHORS_KEPT:]
        return kept[0] if kept else NOTHING

    async def advance(self, ctx: Context) -> None:
        """Fold, and anchor where it is time, up to the newest version within reach."""
        way = self._catalog.plan(NOTHING)
        newest = way[-1].policy_version if way else NOTHING
        target = newest // FOLD_EVERY * FOLD_EVERY
        if target < FOLD_EVERY or self._catalog.find(target, SnapshotKind.FOLD) is not None:
            return
        base_version = target - FOLD_EVERY
        base = await self._image_at(base_version, ctx)
        loaded = await self._loader.load(base, base_version, target, ctx)
        await self._put(loaded.manifest, base_version, base, loaded.image, ctx)
        if target % ANCHOR_EVERY == 0:
            await self._put(loaded.manifest, NOTHING, None, loaded.image, ctx)
        self._image, self._version = loaded.image, target
        await self._delete_old()

    async def _image_at(self, version: int, ctx: Context) -> Image:
        if self._image is None or self._version != version:
            loaded = await self._loader.load(None, NOTHING, version, ctx)
            self._image, self._version = loaded.image, version
        return self._image

    async def _put(
        self,
        manifest: WeightsPublished,
        base_version: int,
        base: Image | None,
        image: Image,
        ctx: Context,
    ) -> None:
        origin = Origin(
            policy_version=manifest.policy_version,
            base_version=base_version,
            kind=SnapshotKind.ANCHOR if base is None else SnapshotKind.FOLD,
            optimizer_step=manifest.optimizer_step,
            fencing_token=manifest.fencing_token,
        )
        made, objects = await ctx.offload(pack_version, origin, base, image)
        await replace_version(self._local, made, objects, ctx.sleep)
        self._catalog.add(made)

    async def _delete_old(self) -> None:
        """Delete by key, manifests first, so that what a failed put left behind goes too."""
        oldest = self.oldest_version
        if oldest <= 0:
            return
        keys = await self._local.keys(PREFIX)
        for key in sorted(keys, key=lambda key: not key.endswith("/manifest")):
            version, kind = key.removeprefix(PREFIX).split("/")[:2]
            if int(version) < oldest or (int(version) == oldest and kind != SnapshotKind.ANCHOR):
                await self._local.delete(key)
        await self._catalog.refresh()
