"""Objects and manifests in and out of stores, with patience and every check."""

import logging
from collections.abc import Awaitable, Callable, Mapping

from blake3 import blake3

from penstock.actors.sync_relay.objects import manifest_key
from penstock.messages import codec
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError, NotFoundError, PenstockError
from penstock.messages.weights import ShardRef, WeightsPublished

_log = logging.getLogger(__name__)
_NUM_PUTS_MAX = 6
_PUT_BACKOFF_S = 0.25
_NUM_GETS_MAX = 5
_GET_BACKOFF_S = 0.2
Sleep = Callable[[float], Awaitable[None]]


class DamagedStoreError(PenstockError, OSError):
    """A store keeps giving damaged objects, or none; whoever needs them cannot go on."""


async def put_version(
    store: ObjectStore, manifest: WeightsPublished, objects: Mapping[str, bytes], sleep: Sleep
) -> None:
    """Store the objects, then the manifest, which makes them count.

    Raises:
        CorruptDataError: another manifest of this version is there.
        OSError: no room, after several attempts.

    """
    for key, data in objects.items():
        try:
            await _put_patiently(store, key, data, sleep)
        except CorruptDataError:  # the key names the bytes: what is there is damaged
            await store.delete(key)
            await _put_patiently(store, key, data, sleep)
    await _put_patiently(store, manifest_key(manifest), codec.encode(manifest), sleep)


async def replace_version(
    store: ObjectStore, manifest: WeightsPublished, objects: Mapping[str, bytes], sleep: Sleep
) -> None:
    """Store a version that is absent or has a damaged manifest, in a store of one's own.

    Raises:
        OSError: no room, after several attempts.

    """
    await store.delete(manifest_key(manifest))
    await put_version(store, manifest, objects, sleep)


async def _put_patiently(store: ObjectStore, key: str, data: bytes, sleep: Sleep) -> None:
    for attempt in range(_NUM_PUTS_MAX):
        try:
            return await store.put(key, data)
        except OSError as error:
            if attempt == _NUM_PUTS_MAX - 1:
                raise
            _log.warning("object %s: trying again: %s", key, error)
            await sleep(_PUT_BACKOFF_S * 2**attempt)


async def get_checked(store: ObjectStore, shard: ShardRef) -> bytes:
    """Fetch one object.

    Raises:
        CorruptDataError: its size or blake3 is not the manifest's.
        NotFoundError: it is not there.

    """
    data = await store.get(shard.object_key)
    if len(data) != shard.num_bytes or blake3(data).hexdigest() != shard.blake3:
        raise CorruptDataError(f"object {shard.object_key}: its blake3 is not the manifest's")
    return data


async def get_patiently(store: ObjectStore, shard: ShardRef, sleep: Sleep) -> bytes:
    """Fetch one object, several times if need be.

    Raises:
        DamagedStoreError: it came damaged, or not at all, every time.

    """
    num_failed = 0
    while True:
        try:
            return await get_checked(store, shard)
        except (CorruptDataError, NotFoundError, OSError) as error:
            num_failed += 1
            if num_failed == _NUM_GETS_MAX:
                raise DamagedStoreError(f"after {num_failed} attempts: {error}") from error
            _log.warning("fetching again: %s", error)
        await sleep(_GET_BACKOFF_S * 2**num_failed)


async def read_manifest(store: ObjectStore, key: str) -> WeightsPublished:
    """Read one manifest.

    Raises:
        CorruptDataError: not a manifest, or one that belongs elsewhere.
        NotFoundError: it is not there.

    """
    data = await store.get(key)
    try:
        manifest = codec.decode(data)
    except ValueError as error:
        raise CorruptDataError(f"object {key}: not a manifest: {error}") from error
    if not isinstance(manifest, WeightsPublished) or manifest_key(manifest) != key:
        raise CorruptDataError(f"object {key}: not the manifest of this key")
    return manifest
