"""The trainer's side: each version once into the origin store, whole only the first time.

```
 encode and upload every shard ─▶ manifest ─▶ head, swapped under the token ─▶ the base moves
                                                   └─ refused: a newer publisher has taken over
```
"""

import asyncio
import logging
from collections.abc import Callable

from penstock.actors.runtime.snapshots import Snapshot
from penstock.actors.sync_relay.catalog import NOTHING, Catalog
from penstock.actors.sync_relay.head import FencedHead
from penstock.actors.sync_relay.image import Image, Table, cut
from penstock.actors.sync_relay.objects import Origin, apply_version, begin_anchor, folder_key
from penstock.actors.sync_relay.shipping import Offload, store_version
from penstock.actors.sync_relay.transfer import (
    DamagedStoreError,
    Sleep,
    bounded,
    get_patiently,
    read_manifest,
)
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError, NotFoundError, PublishConflictError
from penstock.messages.weights import Extent, SnapshotKind, WeightsPublished

Cut = Callable[[Table], list[Extent]]
_log = logging.getLogger(__name__)


class Publisher:
    """A `SnapshotPublisher` over an object store.

    The first publication claims a fencing token, one higher than any before; from then on a
    publisher with a lower one is refused. The base moves only once a version is committed.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        sleep: Sleep = asyncio.sleep,
        offload: Offload = asyncio.to_thread,
        cut_shards: Cut = cut,
    ) -> None:
        """Prepare; nothing is read or claimed yet.

        Args:
            store: the origin.
            sleep: waits between attempts.
            offload: runs blocking work; a simulation's clock needs one without threads.
            cut_shards: cuts a tensor table into shards; receivers take any cut.

        """
        self._store = store
        self._sleep = sleep
        self._offload = offload
        self._cut = cut_shards
        self._head = FencedHead(store, sleep)
        self._base: Image | None = None
        self._base_manifest: WeightsPublished | None = None

    async def prepare(
        self, policy_version: int, snapshot: Snapshot, *, optimizer_step: int, config_json: str
    ) -> WeightsPublished:
        """Store and commit one version; see `SnapshotPublisher.prepare`.

        Raises:
            StaleTokenError: another publisher took over.
            PublishConflictError: this version was committed before, from other weights.
            DamagedStoreError: the store gives damaged objects, attempt after attempt.
            NotFoundError: the store holds no way to the version before this one.
            ValueError: the snapshot's tensors are not those of version 0.
            OSError: no room for the objects, after several attempts; the base has not moved.

        """
        await self._head.hold()
        image = await self._offload(Image.of, snapshot)
        manifest = await self._known(policy_version, image)
        if manifest is None:
            manifest = await self._store_version(policy_version, image, optimizer_step, config_json)
        if policy_version > self._head.policy_version:
            await self._head.advance(policy_version, manifest.target_root_digest)
        self._base, self._base_manifest = image, manifest
        return manifest

    async def _store_version(
        self, version: int, image: Image, optimizer_step: int, config_json: str
    ) -> WeightsPublished:
        base, before = (None, None) if version == 0 else await self._base_at(version - 1)
        if base is not None and base.table != image.table:
            raise ValueError(f"weights {version}: {_table_difference(base, image)}")
        origin = Origin(
            policy_version=version,
            base_version=version - 1,
            kind=SnapshotKind.ANCHOR if base is None else SnapshotKind.DELTA,
            optimizer_step=optimizer_step,
            fencing_token=self._head.token,
            config_json=config_json if base is None else "",
            base_root_digest=before.target_root_digest if before else "",
            base_element_digest=before.target_element_digest if before else "",
        )
        return await store_version(
            self._store, origin, base, image, self._cut(image.table), self._sleep, self._offload
        )

    async def _base_at(self, version: int) -> tuple[Image, WeightsPublished]:
        """Return the image of a version: the one at hand, else read back from the store."""
        held = self._base_manifest
        if self._base is not None and held is not None and held.policy_version == version:
            return self._base, held
        catalog = Catalog(self._store)
        await catalog.refresh()
        way = catalog.plan(NOTHING, version)
        if not way:
            raise NotFoundError(f"weights {version}: the store holds no way to this version")
        _log.info("reading weights %d back from the store, %d steps", version, len(way))
        image: Image | None = None
        for manifest in way:
            image = await self._read_back(image, manifest)
        assert image is not None
        return image, way[-1]

    async def _read_back(self, image: Image | None, manifest: WeightsPublished) -> Image:
        fetching = (get_patiently(self._store, shard, self._sleep) for shard in manifest.shards)
        payloads = await bounded(fetching)
        try:
            if image is None:
                image, payloads = begin_anchor(manifest, payloads)
            write = await self._offload(apply_version, image, manifest, payloads)
            await self._offload(write)
        except CorruptDataError as error:
            raise DamagedStoreError(str(error)) from error
        if await self._offload(image.digest) != manifest.target_root_digest:
            raise DamagedStoreError(f"weights {manifest.policy_version}: another digest")
        return image

    async def _known(self, version: int, image: Image) -> WeightsPublished | None:
        """Return a version's manifest where it is stored already, from these very weights."""
        kind = SnapshotKind.ANCHOR if version == 0 else SnapshotKind.DELTA
        key = folder_key(version, kind, version - 1) + "manifest"
        if not await self._store.exists(key):
            return None
        try:
            stored = await read_manifest(self._store, key)
        except CorruptDataError as error:
            raise DamagedStoreError(str(error)) from error
        if (digest := image.digest()) == stored.target_root_digest:
            return stored
        if version > self._head.policy_version:
            _log.warning("weights %d: replacing what was stored and never committed", version)
            return None
        raise PublishConflictError(
            f"weights {version}: committed before with digest {stored.target_root_digest},"
            f" now {digest}"
        )


def _table_difference(base: Image, image: Image) -> str:
    old, new = set(base.table), set(image.table)
    names = sorted({spec.name for spec in old ^ new})
    return f"the tensors differ from the version before in {names[:5]} ({len(names)} in all)"
