"""The committed versions as their publisher sees them: the newest one's weights, and what follows.

```
 hold: is the head still ours? ─▶ next_origin: what is the base? ─▶ ... ─▶ commit: swap the head;
                                   at hand, else read back                   then the base moves
```
"""

import logging

from penstock.actors.sync_relay.catalog import NOTHING, Catalog
from penstock.actors.sync_relay.head import FencedHead, HeadSlot
from penstock.actors.sync_relay.image import Image, Table
from penstock.actors.sync_relay.objects import (
    MANIFEST,
    Origin,
    apply_version,
    begin_anchor,
    folder_key,
    manifest_key,
)
from penstock.actors.sync_relay.shipping import Offload
from penstock.actors.sync_relay.transfer import (
    DamagedStoreError,
    Sleep,
    get_patiently,
    over_shards,
    read_manifest,
)
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError, NotFoundError, PublishConflictError
from penstock.messages.weights import SnapshotKind, WeightsPublished

_log = logging.getLogger(__name__)


class History:
    """One publisher's hold on the head, and its copy of the newest version."""

    def __init__(self, store: ObjectStore, sleep: Sleep, offload: Offload) -> None:
        self.head = FencedHead(store, sleep)
        self._store = store
        self._sleep = sleep
        self._offload = offload
        self._newest: tuple[Image, WeightsPublished] | None = None

    async def next_origin(
        self, version: int, table: Table, optimizer_step: int, config_json: str
    ) -> tuple[Origin, Image | None]:
        """Return what a version's manifest will say, and its base; None for version 0.

        Raises:
            ValueError: the tensors are not those of the version before.
            NotFoundError: the store holds no way to the version before.
            DamagedStoreError: the store gives damaged objects, attempt after attempt.

        """
        base, before = (None, None) if version == 0 else await self._at(version - 1)
        if base is not None and base.table != table:
            raise ValueError(f"weights {version}: {_table_difference(base.table, table)}")
        origin = Origin(
            policy_version=version,
            base_version=version - 1,
            kind=SnapshotKind.ANCHOR if base is None else SnapshotKind.DELTA,
            optimizer_step=optimizer_step,
            fencing_token=self.head.token,
            config_json=config_json if base is None else "",
            base_root_digest=before.target_root_digest if before else "",
            base_element_digest=before.target_element_digest if before else "",
        )
        return origin, base

    async def known(self, version: int, image: Image) -> WeightsPublished | None:
        """Return a version's manifest where it is committed already, from these very weights.

        Raises:
            PublishConflictError: the version was committed before, from other weights.
            NotFoundError: it is older than all that the store still holds.
            DamagedStoreError: its manifest is damaged.

        """
        if version > self.head.last.policy_version:
            return None
        manifest = await read_committed(self._store, version, self.head.last)
        if (digest := await self._offload(image.digest)) == manifest.target_root_digest:
            return manifest
        raise PublishConflictError(
            f"weights {version}: committed before with digest {manifest.target_root_digest},"
            f" now {digest}"
        )

    async def commit(self, image: Image, manifest: WeightsPublished) -> None:
        """Make a stored version the head; only then it is what the next one is made against.

        Raises:
            StaleTokenError: another publisher took over.

        """
        if manifest.policy_version > self.head.last.policy_version:
            await self.head.advance(manifest)
            await self._collect(manifest)
        self._newest = image, manifest

    async def _collect(self, manifest: WeightsPublished) -> None:
        """Delete the manifests beside a committed one: of attempts that came to nothing."""
        own = manifest_key(manifest)
        for key in await self._store.keys(delta_folder(manifest.policy_version) + MANIFEST):
            if key != own:
                _log.warning("deleting %s, which was never committed", key)
                await self._store.delete(key)

    async def _at(self, version: int) -> tuple[Image, WeightsPublished]:
        """Return the image of a version: the one at hand, else read back from the store."""
        if self._newest is not None and self._newest[1].policy_version == version:
            return self._newest
        return await read_back(self._store, version, self._sleep, self._offload)


def delta_folder(version: int) -> str:
    """Return the common start of the keys of what a publisher stores for a version."""
    kind = SnapshotKind.ANCHOR if version == 0 else SnapshotKind.DELTA
    return folder_key(version, kind, version - 1)


async def read_committed(store: ObjectStore, version: int, head: HeadSlot) -> WeightsPublished:
    """Return the publisher's manifest of a committed version, that of the head or an older one.

    Raises:
        NotFoundError: the store holds it no more.
        DamagedStoreError: it is damaged.

    """
    if version == head.policy_version:
        try:
            return await read_manifest(store, head.manifest_key)
        except (CorruptDataError, NotFoundError) as error:
            raise DamagedStoreError(str(error)) from error
    catalog = await Catalog.of_origin(store)
    kind = SnapshotKind.DELTA if version else SnapshotKind.ANCHOR
    if (manifest := catalog.find(version, kind)) is None:
        raise NotFoundError(f"weights {version}: its manifest is not in the store")
    return manifest


async def read_back(
    store: ObjectStore, version: int, sleep: Sleep, offload: Offload
) -> tuple[Image, WeightsPublished]:
    """Build a version out of a store.

    Raises:
        NotFoundError: the store holds no way to it.
        DamagedStoreError: its objects are damaged or gone, attempt after attempt.

    """
    catalog = await Catalog.of_origin(store)
    way = catalog.plan(NOTHING, version)
    if not way:
        raise NotFoundError(f"weights {version}: the store holds no way to this version")
    _log.info("reading weights %d back from the store, %d steps", version, len(way))
    image: Image | None = None
    for manifest in way:
        payloads = await over_shards(
            lambda shard: get_patiently(store, shard, sleep), manifest.shards
        )
        try:
            if image is None:
                image, payloads = begin_anchor(manifest, payloads)
            write = await offload(apply_version, image, manifest, payloads)
            await offload(write)
        except CorruptDataError as error:
            raise DamagedStoreError(str(error)) from error
        if await offload(image.digest) != manifest.target_root_digest:
            raise DamagedStoreError(f"weights {manifest.policy_version}: another digest")
    assert image is not None
    return image, way[-1]


def _table_difference(old: Table, new: Table) -> str:
    names = sorted({spec.name for spec in set(old) ^ set(new)})
    return f"the tensors differ from the version before in {names[:5]} ({len(names)} in all)"
