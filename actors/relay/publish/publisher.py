"""Publishes each version once to the origin store, first a full snapshot, then deltas.

```
 encode and upload every shard ─▶ manifest ─▶ head, swapped under the token ─▶ the base moves
                                                   └─ refused: a newer publisher has taken over
```
Shards are encoded and uploaded concurrently, the manifest last. Here one process holds the whole
snapshot; `rank_uploads.py` is for a snapshot that many ranks hold together.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from penstock.actors.policy.snapshot import Snapshot
from penstock.actors.relay.core.digests import DigestTable, add_to_digest, make_table
from penstock.actors.relay.core.flat_snapshot import (
    FlatSnapshot,
    Table,
    cut,
    dtype_at,
    table_digest,
)
from penstock.actors.relay.core.objects import (
    EncodedObject,
    ManifestHeader,
    ShardInput,
    encode_shard,
    encode_tables,
    representation,
)
from penstock.actors.relay.core.store_io import StoreIO, gather_bounded
from penstock.actors.relay.publish.history import History, check_same, read_back
from penstock.messages.weights import Extent, ShardRef, SnapshotKind, WeightsPublished

log = logging.getLogger(__name__)

Encode = Callable[[ManifestHeader, ShardInput], Awaitable[EncodedObject]]


async def store_version(
    io: StoreIO,
    header: ManifestHeader,
    base: FlatSnapshot | None,
    flat: FlatSnapshot,
    extents: list[Extent],
) -> WeightsPublished:
    """Encode and upload a version, then its manifest; return the manifest.

    Raises:
        OSError: The store has no room, after several attempts.

    """
    shards = [
        ShardInput(
            number,
            [run],
            None if base is None else base.part([run]),
            flat.part([run]),
            dtype_at(flat.table, run.start),
        )
        # Shard 0 of a full snapshot is the tensor table.
        for number, run in enumerate(extents, int(base is None))
    ]
    stored = await store_shards(io, header, shards)
    digests = await io.offload(make_table, flat.tensors)
    return await seal_version(io, header, flat.table, digests, stored)


async def store_shards(
    io: StoreIO, header: ManifestHeader, shards: Sequence[ShardInput], encode: Encode | None = None
) -> list[EncodedObject]:
    """Encode and upload shards; return them without their bytes.

    Raises:
        OSError: The store has no room, after several attempts.

    """

    async def store(shard: ShardInput) -> EncodedObject:
        if encode is not None:
            return await _put(io, await encode(header, shard))
        return await _put(io, await io.offload(encode_shard, header, shard))

    return await gather_bounded(map(store, shards), (shard.new.nbytes for shard in shards))


async def seal_version(
    io: StoreIO,
    header: ManifestHeader,
    table: Table,
    digests: DigestTable,
    shards: list[EncodedObject],
) -> WeightsPublished:
    """Store the tables and the manifest of a version whose shards are stored; return the manifest.

    Raises:
        OSError: The store has no room, after several attempts.

    """
    rows, data = await io.offload(encode_tables, header, table, digests, len(shards) + 1)
    if header.kind is SnapshotKind.FULL:
        shards = [await _put(io, rows), *shards]
    await _put(io, data)
    manifest = await io.offload(
        _make_manifest, header, table, digests.root_digest(), shards, data.ref
    )
    # Last: a manifest promises that all of its objects are stored.
    await io.put_manifest(manifest)
    return manifest


def _make_manifest(
    header: ManifestHeader,
    table: Table,
    root_digest: str,
    shards: Sequence[EncodedObject],
    digests: ShardRef,
) -> WeightsPublished:
    """Return the manifest of a version whose objects are stored."""
    change = sum(shard.change for shard in shards)
    num_elements: Counter[str] = Counter()
    for spec in table:
        num_elements[spec.dtype] += spec.size
    return WeightsPublished(
        **msgspec.structs.asdict(header),
        representation=representation(num_elements),
        target_root_digest=root_digest,
        target_element_digest=add_to_digest(header.base_element_digest, change),
        num_params=num_elements.total(),
        num_changed=sum(shard.num_changed for shard in shards),
        full_bytes=sum(spec.num_bytes for spec in table),
        shards=[shard.ref for shard in shards],
        tensor_table_digest=table_digest(table),
        digests=digests,
    )


async def _put(io: StoreIO, encoded: EncodedObject) -> EncodedObject:
    await io.put(encoded.ref.object_key, encoded.data)
    # Drop the bytes at once: together, those of a full snapshot are as large as the snapshot.
    return msgspec.structs.replace(encoded, data=b"")


Cut = Callable[[Table], list[Extent]]


class Publisher:
    """A `SnapshotPublisher` over an object store.

    The first publication claims a fencing token higher than any before; from then on publishers
    with a lower token are refused. The base moves only when a version is committed.
    """

    def __init__(self, io: StoreIO, *, cut_shards: Cut = cut) -> None:
        """Initialize without reading or claiming anything.

        Args:
            io: Origin store.
            cut_shards: Function that cuts a tensor table into shards; receivers accept any cut.

        """
        self._io = io
        self._cut = cut_shards
        self._history = History(io)
        self._newest: tuple[FlatSnapshot, WeightsPublished] | None = None

    async def prepare(
        self,
        policy_version: int,
        snapshot: Snapshot,
        *,
        optimizer_step: int,
        config_json: str,
        probe: Sequence[float] = (),
    ) -> WeightsPublished:
        """Store and commit one version; see `SnapshotPublisher.prepare`.

        Raises:
            StaleTokenError: Another publisher took over.
            PublishConflictError: This version was already committed from other weights.
            DamagedStoreError: Objects were damaged or missing in every attempt.
            NotFoundError: The store holds no update path to the version before this one.
            ValueError: The snapshot's tensors are not those of version 0.
            OSError: The store has no room, after several attempts; the base has not moved.

        """
        # Checked before the work: a publisher that was taken over must not upload anything.
        await self._history.head.hold()
        flat = await self._io.offload(FlatSnapshot.of, snapshot)
        manifest = await self._history.known(policy_version)
        if manifest is None:
            before = None if policy_version == 0 else await self._at(policy_version - 1)
            header = self._history.next_header(
                *(policy_version, before[1] if before else None, optimizer_step, config_json, probe)
            )
            manifest = await self._store_version(header, before[0] if before else None, flat)
        else:
            # A trainer that resumed from a checkpoint publishes versions again.
            log.info("weights %d are already committed", policy_version)
            check_same(manifest, await self._io.offload(flat.digest))
        await self._history.commit(manifest)
        self._newest = flat, manifest
        return manifest

    async def _store_version(
        self, header: ManifestHeader, base: FlatSnapshot | None, flat: FlatSnapshot
    ) -> WeightsPublished:
        if base is not None and base.table != flat.table:
            difference = _table_difference(base.table, flat.table)
            raise ValueError(f"weights {header.policy_version}: {difference}")
        return await store_version(self._io, header, base, flat, self._cut(flat.table))

    async def _at(self, version: int) -> tuple[FlatSnapshot, WeightsPublished]:
        """Return a version, from memory if it is the newest, otherwise from the store."""
        if self._newest is not None and self._newest[1].policy_version == version:
            return self._newest
        return await read_back(self._io, version)


def _table_difference(old: Table, new: Table) -> str:
    names = sorted({spec.name for spec in set(old) ^ set(new)})
    return f"the tensors differ from the version before in {names[:5]} ({len(names)} in all)"
