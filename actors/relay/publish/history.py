"""The committed versions as their publisher sees them, and reading them back from the store.

```
 hold the head ─▶ known: committed before? ─▶ next_header ─▶ ... ─▶ commit: swap the head;
                                                                    then the base moves
```
"""

import bisect
import logging
from collections.abc import Iterable, Sequence

import msgspec

from penstock.actors.relay.core.catalog import NOTHING, Catalog
from penstock.actors.relay.core.flat_snapshot import FlatSnapshot
from penstock.actors.relay.core.objects import (
    MANIFEST,
    TABLE_CODEC,
    EncodedObject,
    ManifestHeader,
    Payloads,
    apply_version,
    begin_full_snapshot,
    folder_key,
    manifest_key,
)
from penstock.actors.relay.core.store_io import (
    DamagedStoreError,
    StoreIO,
    for_each_shard,
    read_manifest,
)
from penstock.actors.relay.core.version_head import FencedHead, HeadSlot
from penstock.kernels import delta
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError, NotFoundError, PublishConflictError
from penstock.messages.weights import Extent, ShardRef, SnapshotKind, WeightsPublished

log = logging.getLogger(__name__)


class History:
    """The head, and the versions before it, as seen by one publisher."""

    def __init__(self, io: StoreIO) -> None:
        self.head = FencedHead(io)
        self._store = io.store

    def next_header(
        self,
        version: int,
        before: WeightsPublished | None,
        optimizer_step: int,
        config_json: str,
        probe: Sequence[float] = (),
    ) -> ManifestHeader:
        """Return the header of a version's manifest.

        Args:
            version: Number of the new version.
            before: Manifest of the version before; None for version 0.
            optimizer_step: Step that produced the version.
            config_json: Configuration of the policy; stored only with full snapshots.
            probe: Probe values that the trainer computed with the version.

        Raises:
            ValueError: `before` is not the manifest of the version before.

        """
        if (before.policy_version if before else -1) != version - 1:
            raise ValueError(f"weights {version}: expected the manifest of the version before")
        return ManifestHeader(
            policy_version=version,
            base_version=version - 1,
            kind=SnapshotKind.DELTA if before else SnapshotKind.FULL,
            optimizer_step=optimizer_step,
            fencing_token=self.head.token,
            config_json="" if before else config_json,
            base_root_digest=before.target_root_digest if before else "",
            base_element_digest=before.target_element_digest if before else "",
            probe=list(probe),
        )

    async def known(self, version: int) -> WeightsPublished | None:
        """Return a version's manifest if it is already committed, or None.

        Raises:
            NotFoundError: The store no longer holds the version.
            DamagedStoreError: The version's manifest is damaged.

        """
        if version > self.head.last.policy_version:
            return None
        return await read_committed(self._store, version, self.head.last)

    async def commit(self, manifest: WeightsPublished) -> None:
        """Make a stored version the head.

        Raises:
            StaleTokenError: Another publisher took over.

        """
        if manifest.policy_version > self.head.last.policy_version:
            await self.head.advance(manifest)
            log.info(
                "committed weights %d: %s, %d bytes, %d of %d elements changed",
                manifest.policy_version,
                manifest.kind,
                sum(shard.num_bytes for shard in manifest.shards),
                manifest.num_changed,
                manifest.num_params,
            )
            await self._collect(manifest)

    async def _collect(self, manifest: WeightsPublished) -> None:
        """Delete the manifests of failed attempts at a committed version."""
        committed = manifest_key(manifest)
        for key in await self._store.keys(delta_folder(manifest.policy_version) + MANIFEST):
            if key != committed:
                log.warning("deleting %s, which was never committed", key)
                await self._store.delete(key)


def check_same(manifest: WeightsPublished, digest: str) -> WeightsPublished:
    """Return the manifest of a committed version after checking that the weights are the same.

    Raises:
        PublishConflictError: The version was committed from other weights.

    """
    if digest != manifest.target_root_digest:
        raise PublishConflictError(
            f"weights {manifest.policy_version}: already committed with digest"
            f" {manifest.target_root_digest}, got {digest}"
        )
    return manifest


def delta_folder(version: int) -> str:
    """Return the key prefix of the objects that a publisher stores for a version."""
    kind = SnapshotKind.FULL if version == 0 else SnapshotKind.DELTA
    return folder_key(version, kind, version - 1)


async def read_committed(store: ObjectStore, version: int, head: HeadSlot) -> WeightsPublished:
    """Return the manifest that the publisher committed for a version up to the head's.

    Raises:
        NotFoundError: The store no longer holds the manifest.
        DamagedStoreError: The manifest is damaged.

    """
    # The head names its manifest, which saves listing the store in the usual case.
    if version == head.policy_version:
        try:
            return await read_manifest(store, head.manifest_key)
        except (CorruptDataError, NotFoundError) as error:
            raise DamagedStoreError(str(error)) from error
    catalog = await Catalog.of_origin(store)
    kind = SnapshotKind.DELTA if version else SnapshotKind.FULL
    if (manifest := catalog.find(version, kind)) is None:
        raise NotFoundError(f"weights {version}: the store does not hold the manifest")
    return manifest


async def was_committed(
    store: ObjectStore, version: int, head: HeadSlot, shards: Iterable[EncodedObject]
) -> bool:
    """Return whether a committed version has these shards; raise as `read_committed` does."""
    manifest = await read_committed(store, version, head)
    keys = {shard.object_key for shard in manifest.shards}
    return all(shard.ref.object_key in keys for shard in shards)


async def read_back(io: StoreIO, version: int) -> tuple[FlatSnapshot, WeightsPublished]:
    """Build a version from the store, and return it with its manifest.

    Raises:
        NotFoundError: The store holds no update path to the version.
        DamagedStoreError: Objects were damaged or missing in every attempt.

    """
    path = await _update_path(io, version)
    flat: FlatSnapshot | None = None
    for manifest in path:
        flat, _ = await _advance(io, flat, manifest)
        # After every update: a wrong digest is attributed to the version that caused it.
        if await io.offload(flat.digest) != manifest.target_root_digest:
            raise DamagedStoreError(
                f"weights {manifest.policy_version}: expected root digest"
                f" {manifest.target_root_digest}, got another one from the store's objects"
            )
    assert flat is not None
    return flat, path[-1]


async def read_back_part(io: StoreIO, version: int, needed: Sequence[Extent]) -> FlatSnapshot:
    """Build some extents of a version from the store, reading only the objects they depend on.

    Returns:
        A snapshot whose other elements are undefined; their memory is not touched.

    Raises:
        NotFoundError: The store holds no update path to the version.
        DamagedStoreError: Objects were damaged or missing in every attempt.

    """
    path = await _update_path(io, version)
    flat: FlatSnapshot | None = None
    for manifest, shards in zip(path, required_shards(path, needed), strict=True):
        part = msgspec.structs.replace(manifest, shards=shards)
        flat, payloads = await _advance(io, flat, part)
        await io.offload(_check_written, flat, part, payloads)
    assert flat is not None
    return flat


def required_shards(
    path: Sequence[WeightsPublished], needed: Sequence[Extent]
) -> list[list[ShardRef]]:
    """Return the shards of each version that some extents depend on, including tables."""
    ranges = _ranges(needed)
    # A shard can only be decoded whole, so all shards that overlap it in other versions are needed,
    # too, and those that overlap these: widen until nothing changes. If all versions are cut alike,
    # that is after one round.
    while True:
        found = [
            [
                shard
                for shard in manifest.shards
                if not shard.extents or _meet(shard.extents, ranges)
            ]
            for manifest in path
        ]
        extents = [extent for shards in found for shard in shards for extent in shard.extents]
        wider = _ranges([*needed, *extents])
        if wider == ranges:
            return found
        ranges = wider


def _ranges(extents: Iterable[Extent]) -> list[tuple[int, int]]:
    """Return the union of extents as sorted, disjoint ranges."""
    ranges: list[tuple[int, int]] = []
    for start, end in sorted((run.start, run.start + run.num_elements) for run in extents):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((start, end))
    return ranges


def _meet(extents: Iterable[Extent], ranges: list[tuple[int, int]]) -> bool:
    """Return whether some extents have an element in common with sorted ranges."""
    for run in extents:
        at = bisect.bisect_right(ranges, run.start, key=lambda pair: pair[1])
        if at < len(ranges) and ranges[at][0] < run.start + run.num_elements:
            return True
    return False


async def _update_path(io: StoreIO, version: int) -> list[WeightsPublished]:
    catalog = await Catalog.of_origin(io.store)
    path = catalog.plan(NOTHING, version)
    if not path:
        raise NotFoundError(f"weights {version}: the store holds no update path to this version")
    log.info("reading weights %d back from the store in %d updates", version, len(path))
    return path


async def _advance(
    io: StoreIO, flat: FlatSnapshot | None, manifest: WeightsPublished
) -> tuple[FlatSnapshot, Payloads]:
    """Write one version's shards over its base; return the snapshot and the shards' payloads."""
    payloads = await for_each_shard(io.get, manifest.shards)
    try:
        if flat is None:
            flat, payloads = begin_full_snapshot(manifest, payloads)
        write = await io.offload(apply_version, flat, manifest, payloads)
        await io.offload(write)
    except CorruptDataError as error:
        raise DamagedStoreError(str(error)) from error
    return flat, payloads


def _check_written(flat: FlatSnapshot, manifest: WeightsPublished, payloads: Payloads) -> None:
    """Check each shard's elements against the checksum in its payload."""
    # A part of a snapshot has no root digest to compare with.
    shards = [shard for shard in manifest.shards if shard.codec != TABLE_CODEC]
    for shard, payload in zip(shards, payloads, strict=True):
        if delta.check_of(flat.part(shard.extents)) != delta.read_header(payload).target_check:
            raise DamagedStoreError(
                f"weights {manifest.policy_version}: object {shard.object_key} decodes to elements"
                " with another checksum"
            )
