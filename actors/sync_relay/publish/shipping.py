"""One version into a store: shards are encoded and uploaded several at once, the manifest last."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock.actors.sync_relay.core.digests import DigestTable, make_table
from penstock.actors.sync_relay.core.flat_snapshot import Image, Table, dtype_at
from penstock.actors.sync_relay.core.objects import (
    Encoded,
    Origin,
    encode_shard,
    encode_tables,
    make_manifest,
)
from penstock.actors.sync_relay.core.transfer import Sleep, bounded, put_manifest, put_object
from penstock.messages.bus import ObjectStore
from penstock.messages.weights import Extent, SnapshotKind, WeightsPublished

Offload = Callable[..., Awaitable[Any]]


class Piece(NamedTuple):
    """What becomes one shard."""

    number: int
    extents: Sequence[Extent]
    old: np.ndarray | None
    """[N] elements of the base; None for an anchor."""
    new: np.ndarray
    """[N] elements of the version."""
    dtype: str
    """Of the elements, in the tensor table."""


async def store_version(  # noqa: PLR0913, PLR0917 - a version, and where and how to store it
    store: ObjectStore,
    origin: Origin,
    base: Image | None,
    image: Image,
    extents: list[Extent],
    sleep: Sleep,
    offload: Offload,
) -> WeightsPublished:
    """Encode and upload a version, several shards at once, then its manifest; return that.

    Raises:
        OSError: no room, after several attempts.

    """
    pieces = [
        Piece(
            number,
            [run],
            None if base is None else base.part([run]),
            image.part([run]),
            dtype_at(image.table, run.start),
        )
        for number, run in enumerate(extents, int(base is None))
    ]
    shards = await store_shards(store, origin, pieces, sleep, offload)
    digests = await offload(make_table, image.tensors)
    return await seal_version(store, origin, image.table, digests, shards, sleep, offload)


async def store_shards(
    store: ObjectStore, origin: Origin, pieces: Sequence[Piece], sleep: Sleep, offload: Offload
) -> list[Encoded]:
    """Encode and upload shards, several at once; return what they are, without their bytes.

    Raises:
        OSError: no room, after several attempts.

    """

    async def make(piece: Piece) -> Encoded:
        return await _ship(store, await offload(encode_shard, origin, *piece), sleep)

    return await bounded(map(make, pieces), (piece.new.nbytes for piece in pieces))


async def seal_version(  # noqa: PLR0913, PLR0917 - a version, and where and how to store it
    store: ObjectStore,
    origin: Origin,
    table: Table,
    digests: DigestTable,
    shards: list[Encoded],
    sleep: Sleep,
    offload: Offload,
) -> WeightsPublished:
    """Store the tables of a version whose shards are stored, then its manifest; return that.

    Raises:
        OSError: no room, after several attempts.

    """
    rows, data = await offload(encode_tables, origin, table, digests, len(shards) + 1)
    if origin.kind is SnapshotKind.ANCHOR:
        shards = [await _ship(store, rows, sleep), *shards]
    await _ship(store, data, sleep)
    manifest = await offload(make_manifest, origin, table, digests.root_digest(), shards, data.ref)
    await put_manifest(store, manifest, sleep)
    return manifest


async def _ship(store: ObjectStore, encoded: Encoded, sleep: Sleep) -> Encoded:
    await put_object(store, encoded.ref.object_key, encoded.data, sleep)
    return msgspec.structs.replace(encoded, data=b"")
