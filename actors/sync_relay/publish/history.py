"""The committed versions as their publisher sees them: is the head still ours, what is there.

```
 hold the head ─▶ known: committed before? ─▶ next_origin ─▶ ... ─▶ commit: swap the head;
                                                                    then the base moves
```
"""

import logging
from collections.abc import Iterable

from penstock.actors.sync_relay.core.catalog import NOTHING, Catalog
from penstock.actors.sync_relay.core.flat_snapshot import Image
from penstock.actors.sync_relay.core.head import FencedHead, HeadSlot
from penstock.actors.sync_relay.core.objects import (
    MANIFEST,
    Encoded,
    Origin,
    apply_version,
    begin_anchor,
    folder_key,
    manifest_key,
)
from penstock.actors.sync_relay.core.transfer import (
    DamagedStoreError,
    Sleep,
    get_patiently,
    over_shards,
    read_manifest,
)
from penstock.actors.sync_relay.publish.shipping import Offload
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError, NotFoundError, PublishConflictError
from penstock.messages.weights import SnapshotKind, WeightsPublished

_log = logging.getLogger(__name__)


class History:
    """One publisher's hold on the head."""

    def __init__(self, store: ObjectStore, sleep: Sleep) -> None:
        self.head = FencedHead(store, sleep)
        self._store = store

    def next_origin(
        self, version: int, before: WeightsPublished | None, optimizer_step: int, config_json: str
    ) -> Origin:
        """Return what a version's manifest will say; `before` is that of its base, if it has one.

        Raises:
            ValueError: `before` is not the manifest of the version before.

        """
        if (before.policy_version if before else -1) != version - 1:
            raise ValueError(f"weights {version}: expected the manifest of the version before")
        return Origin(
            policy_version=version,
            base_version=version - 1,
            kind=SnapshotKind.DELTA if before else SnapshotKind.ANCHOR,
            optimizer_step=optimizer_step,
            fencing_token=self.head.token,
            config_json="" if before else config_json,
            base_root_digest=before.target_root_digest if before else "",
            base_element_digest=before.target_element_digest if before else "",
        )

    async def known(self, version: int) -> WeightsPublished | None:
        """Return a version's manifest where it is committed already.

        Raises:
            NotFoundError: it is older than all that the store still holds.
            DamagedStoreError: its manifest is damaged.

        """
        if version > self.head.last.policy_version:
            return None
        return await read_committed(self._store, version, self.head.last)

    async def commit(self, manifest: WeightsPublished) -> None:
        """Make a stored version the head.

        Raises:
            StaleTokenError: another publisher took over.

        """
        if manifest.policy_version > self.head.last.policy_version:
            await self.head.advance(manifest)
            await self._collect(manifest)

    async def _collect(self, manifest: WeightsPublished) -> None:
        """Delete the manifests beside a committed one: of attempts that came to nothing."""
        own = manifest_key(manifest)
        for key in await self._store.keys(delta_folder(manifest.policy_version) + MANIFEST):
            if key != own:
                _log.warning("deleting %s, which was never committed", key)
                await self._store.delete(key)


def check_same(manifest: WeightsPublished, digest: str) -> WeightsPublished:
    """Return the manifest of a version that is committed already, from these very weights.

    Raises:
        PublishConflictError: from other weights.

    """
    if digest != manifest.target_root_digest:
        raise PublishConflictError(
            f"weights {manifest.policy_version}: committed before with digest"
            f" {manifest.target_root_digest}, now {digest}"
        )
    return manifest


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


async def was_committed(
    store: ObjectStore, version: int, head: HeadSlot, shards: Iterable[Encoded]
) -> bool:
    """Return whether a committed version consists of these shards; raises like `read_committed`."""
    manifest = await read_committed(store, version, head)
    keys = {shard.object_key for shard in manifest.shards}
    return all(shard.ref.object_key in keys for shard in shards)


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
