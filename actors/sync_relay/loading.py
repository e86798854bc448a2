"""From the version at hand to a newer one, through whatever damage the region's store has.

```
     way = cheapest chain, folds or anchor in the region; the origin's where that falls short
       │
  object damaged or gone ─▶ fetched from the origin and put back ─▶ not there, as it was made in
       │                                              the region: drop its manifest, plan again
  digest wrong ─▶ the image at hand is not to be trusted: begin from an anchor
```
"""

import logging
from contextlib import suppress

import msgspec

from penstock.actors.runtime.context import Context
from penstock.actors.sync_relay.catalog import NOTHING, Catalog, num_bytes
from penstock.actors.sync_relay.image import Image
from penstock.actors.sync_relay.objects import manifest_key, unpack_version
from penstock.actors.sync_relay.transfer import DamagedStoreError, get_checked
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError, NotFoundError
from penstock.messages.weights import ShardRef, WeightsPublished

_log = logging.getLogger(__name__)
_NUM_PLANS_MAX = 8


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A verified version."""

    image: Image
    manifest: WeightsPublished
    num_bytes: int
    """Of the objects it took."""
    num_mismatches: int
    """Digests that were wrong on the way."""


class _UnusableError(Exception):
    """A manifest whose objects are damaged or gone everywhere, or that contradicts them."""

    def __init__(self, manifest: WeightsPublished) -> None:
        super().__init__(manifest)
        self.manifest = manifest


class _WrongDigestError(_UnusableError):
    """Sound objects that do not give the manifest's digest: it or the base is wrong."""


class Loader:
    """Reads versions out of a region's store."""

    def __init__(self, local: ObjectStore, catalog: Catalog) -> None:
        self._local = local
        self._catalog = catalog

    async def load(self, image: Image | None, version: int, target: int, ctx: Context) -> Loaded:
        """Load `target` from `version`, whose image is at hand (None for NOTHING).

        Raises:
            NotFoundError: neither the region nor the origin holds a way.
            DamagedStoreError: damage that no other way goes around.

        """
        num_mismatches = 0
        for _ in range(_NUM_PLANS_MAX):
            way = await self._way(version, target, ctx)
            try:
                loaded = await self._walk(image, way, ctx)
            except _WrongDigestError as error:
                num_mismatches += 1
                if version == NOTHING:
                    await self._drop(error.manifest)
                image, version = None, NOTHING
            except _UnusableError as error:
                await self._drop(error.manifest)
            else:
                return Loaded(
                    image=loaded,
                    manifest=way[-1],
                    num_bytes=sum(num_bytes(manifest) for manifest in way),
                    num_mismatches=num_mismatches,
                )
        raise DamagedStoreError(f"weights {target}: no undamaged way after {_NUM_PLANS_MAX} plans")

    async def _way(self, version: int, target: int, ctx: Context) -> list[WeightsPublished]:
        way = self._catalog.plan(version, target)
        if not way:
            origin = Catalog(ctx.store)
            await origin.refresh()
            way = origin.plan(version, target)
        if not way:
            raise NotFoundError(f"weights {target}: no way from {version} in region or origin")
        return way

    async def _walk(self, image: Image | None, way: list[WeightsPublished], ctx: Context) -> Image:
        for manifest in way:
            try:
                payloads = [await self._fetch(shard, ctx) for shard in manifest.shards]
            except (CorruptDataError, NotFoundError) as error:
                raise _UnusableError(manifest) from error
            try:
                image = await ctx.offload(unpack_version, image, manifest, payloads)
            except CorruptDataError as error:
                raise _WrongDigestError(manifest) from error
        assert image is not None
        return image

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
