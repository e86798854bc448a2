"""Objects and manifests in and out of a store: checked, and retried where that can help."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from blake3 import blake3

from penstock.actors.sync_relay.core.objects import manifest_key, manifest_key_of
from penstock.messages import codec
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import (
    CorruptDataError,
    NotFoundError,
    PenstockError,
    StoreUnreachableError,
)
from penstock.messages.weights import ShardRef, WeightsPublished

_log = logging.getLogger(__name__)
_NUM_PUTS_MAX = 6
_PUT_BACKOFF_S = 0.25
_NUM_GETS_MAX = 5
_GET_BACKOFF_S = 0.2
R = TypeVar("R")


class DamagedStoreError(PenstockError, OSError):
    """A store returns damaged objects, or none, attempt after attempt."""


class StoreIO(NamedTuple):
    """A store, and how its users wait and run blocking work."""

    store: ObjectStore
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    """Waits between attempts."""
    offload: Callable[..., Awaitable[Any]] = asyncio.to_thread
    """Runs blocking work; a simulation's clock needs one without threads."""

    async def put(self, key: str, data: bytes) -> None:
        """Store an object whose key names its bytes: any other bytes there are damaged.

        Raises:
            OSError: No room, after several attempts.

        """
        try:
            await self.put_once(key, data)
        except CorruptDataError:
            await self.store.delete(key)
            await self.put_once(key, data)

    async def put_once(self, key: str, data: bytes) -> None:
        """Store an object where there is none, with retries.

        A store that is away has been waited for by its own deadline, and is not tried again.

        Raises:
            CorruptDataError: Other bytes are there.
            StoreUnreachableError: The store is away.
            OSError: No room, after several attempts.

        """
        for attempt in range(_NUM_PUTS_MAX):
            try:
                return await self.store.put(key, data)
            except StoreUnreachableError:
                raise
            except OSError as error:
                if attempt == _NUM_PUTS_MAX - 1:
                    raise
                _log.warning("object %s: trying again: %s", key, error)
                await self.sleep(_PUT_BACKOFF_S * 2**attempt)

    async def put_manifest(self, manifest: WeightsPublished) -> None:
        """Store the manifest of a version whose objects are stored; raises as `put` does."""
        await self.put(manifest_key(manifest), codec.encode(manifest))

    async def get(self, shard: ShardRef) -> bytes:
        """Fetch one object; raises as `read` does."""
        return await self.read(lambda: get_checked(self.store, shard))

    async def read(self, attempt: Callable[[], Awaitable[R]]) -> R:
        """Read something, with retries.

        Raises:
            StoreUnreachableError: The store is away, by its own deadline.
            DamagedStoreError: It came damaged, or not at all, every time.

        """
        num_failed = 0
        while True:
            try:
                return await attempt()
            except StoreUnreachableError:
                raise
            except (CorruptDataError, NotFoundError, OSError) as error:
                num_failed += 1
                if num_failed == _NUM_GETS_MAX:
                    raise DamagedStoreError(f"after {num_failed} attempts: {error}") from error
                _log.warning("fetching again: %s", error)
            await self.sleep(_GET_BACKOFF_S * 2**num_failed)


async def get_checked(store: ObjectStore, shard: ShardRef) -> bytes:
    """Fetch one object, once.

    Raises:
        CorruptDataError: Its size or blake3 is not the manifest's.
        NotFoundError: It is not there.

    """
    data = await store.get(shard.object_key)
    if len(data) != shard.num_bytes or blake3(data).hexdigest() != shard.blake3:
        raise CorruptDataError(f"object {shard.object_key}: its blake3 is not the manifest's")
    return data


async def read_manifest(store: ObjectStore, key: str) -> WeightsPublished:
    """Read one manifest.

    Raises:
        CorruptDataError: Not a manifest, or one that belongs under another key.
        NotFoundError: It is not there.

    """
    data = await store.get(key)
    try:
        manifest = codec.decode(data)
    except ValueError as error:
        raise CorruptDataError(f"object {key}: not a manifest: {error}") from error
    if not isinstance(manifest, WeightsPublished) or manifest_key_of(manifest, data) != key:
        raise CorruptDataError(f"object {key}: not the manifest of this key")
    return manifest
