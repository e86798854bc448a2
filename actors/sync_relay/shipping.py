"""One version into a store: shards are encoded and uploaded several at once, the manifest last."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from penstock.actors.sync_relay.image import Image
from penstock.actors.sync_relay.objects import (
    Encoded,
    Origin,
    encode_shard,
    encode_tables,
    make_manifest,
)
from penstock.actors.sync_relay.transfer import Sleep, bounded, put_manifest, put_object
from penstock.messages.bus import ObjectStore
from penstock.messages.weights import Extent, WeightsPublished

Offload = Callable[..., Awaitable[Any]]


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

    async def ship(encoded: Encoded) -> Encoded:
        await put_object(store, encoded.ref.object_key, encoded.data, sleep)
        return msgspec.structs.replace(encoded, data=b"")

    async def make(number: int, extent: Extent) -> Encoded:
        return await ship(await offload(encode_shard, origin, number, [extent], base, image))

    first = int(base is None)
    table, digests = await offload(encode_tables, origin, image, first + len(extents))
    shards = await bounded(make(first + n, extent) for n, extent in enumerate(extents))
    if base is None:
        shards = [await ship(table), *shards]
    await ship(digests)
    manifest = await offload(make_manifest, origin, image, shards, digests.ref)
    await put_manifest(store, manifest, sleep)
    return manifest
