"""One version into a store: shards are encoded and uploaded concurrently, the manifest last."""

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from penstock.actors.sync_relay.core.digests import DigestTable, make_table
from penstock.actors.sync_relay.core.flat_snapshot import FlatSnapshot, Table, dtype_at
from penstock.actors.sync_relay.core.objects import (
    EncodedObject,
    ManifestHeader,
    ShardInput,
    encode_shard,
    encode_tables,
    make_manifest,
)
from penstock.actors.sync_relay.core.store_io import StoreIO, gather_bounded
from penstock.messages.weights import Extent, SnapshotKind, WeightsPublished

Encode = Callable[[ManifestHeader, ShardInput], Awaitable[EncodedObject]]


async def store_version(
    io: StoreIO,
    header: ManifestHeader,
    base: FlatSnapshot | None,
    flat: FlatSnapshot,
    extents: list[Extent],
) -> WeightsPublished:
    """Encode and upload a version, then its manifest, which is returned.

    Raises:
        OSError: No room, after several attempts.

    """
    shards = [
        ShardInput(
            number,
            [run],
            None if base is None else base.part([run]),
            flat.part([run]),
            dtype_at(flat.table, run.start),
        )
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
        OSError: No room, after several attempts.

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
    """Store the tables of a version whose shards are stored, then its manifest; return that.

    Raises:
        OSError: No room, after several attempts.

    """
    rows, data = await io.offload(encode_tables, header, table, digests, len(shards) + 1)
    if header.kind is SnapshotKind.FULL:
        shards = [await _put(io, rows), *shards]
    await _put(io, data)
    manifest = await io.offload(
        make_manifest, header, table, digests.root_digest(), shards, data.ref
    )
    await io.put_manifest(manifest)
    return manifest


async def _put(io: StoreIO, encoded: EncodedObject) -> EncodedObject:
    await io.put(encoded.ref.object_key, encoded.data)
    return msgspec.structs.replace(encoded, data=b"")
