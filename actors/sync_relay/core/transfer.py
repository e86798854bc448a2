"""Objects and manifests in and out of stores, with patience and every check."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import repeat
from typing import Any, TypeVar

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
WINDOW_BYTES = 1 << 30
"""Of one version on their way at once: what 100 Gbit/s carry in 86 ms.
What arrived is held besides."""
NUM_TRANSFERS_MIN = 8
"""At once however large they are, so that no link is idle for a round trip between two."""
NUM_TRANSFERS_MAX = 64
R = TypeVar("R")
Sleep = Callable[[float], Awaitable[None]]


class DamagedStoreError(PenstockError, OSError):
    """A store keeps giving damaged objects, or none; whoever needs them cannot go on."""


class _Window:
    """Room for bytes, in the order of arrival; an object takes a 64th to an eighth of it."""

    def __init__(self) -> None:
        self._num_free = WINDOW_BYTES
        self._turn = asyncio.Lock()
        self._left = asyncio.Event()

    @asynccontextmanager
    async def room(self, num_bytes: int) -> AsyncGenerator[None]:
        least, most = WINDOW_BYTES // NUM_TRANSFERS_MAX, WINDOW_BYTES // NUM_TRANSFERS_MIN
        taken = min(max(num_bytes, least), most)
        async with self._turn:
            while self._num_free < taken:
                self._left.clear()
                await self._left.wait()
            self._num_free -= taken
        try:
            yield
        finally:
            self._num_free += taken
            self._left.set()


async def bounded(
    work: Iterable[Coroutine[Any, Any, R]], sizes: Iterable[int] | None = None
) -> list[R]:
    """Do pieces of work at once, as many as the window has room for: from 8 of them to 64.

    A link of long delay takes many objects at once, until they make as many bytes as it holds.
    The first failure ends the others.

    Args:
        work: to be done, in this order.
        sizes: of what each one moves, in bytes; without them, the fewest are done at once.

    Returns:
        The results, in order.

    """
    window = _Window()

    async def do(piece: Coroutine[Any, Any, R], num_bytes: int) -> R:
        async with window.room(num_bytes):
            return await piece

    pieces = list(work)
    sizes = repeat(WINDOW_BYTES) if sizes is None else sizes
    tasks = [asyncio.ensure_future(do(*pair)) for pair in zip(pieces, sizes, strict=False)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for piece in pieces:
            piece.close()  # what never had its turn


async def over_shards(
    act: Callable[[ShardRef], Coroutine[Any, Any, R]], shards: Sequence[ShardRef]
) -> list[R]:
    """Do something with every object of a version, as many at once as the window has room for."""
    return await bounded(map(act, shards), (shard.num_bytes for shard in shards))


async def put_object(store: ObjectStore, key: str, data: bytes, sleep: Sleep) -> None:
    """Store an object whose key names its bytes: what else is there is damaged.

    Raises:
        OSError: no room, after several attempts.

    """
    try:
        await put_patiently(store, key, data, sleep)
    except CorruptDataError:
        await store.delete(key)
        await put_patiently(store, key, data, sleep)


async def put_manifest(store: ObjectStore, manifest: WeightsPublished, sleep: Sleep) -> None:
    """Store the manifest of a version whose objects are stored.

    Raises:
        OSError: no room, after several attempts.

    """
    await put_object(store, manifest_key(manifest), codec.encode(manifest), sleep)


def all_objects(manifest: WeightsPublished) -> list[ShardRef]:
    """Return every object of a version but the manifest itself."""
    return [*manifest.shards, *([manifest.digests] if manifest.digests else [])]


async def put_patiently(store: ObjectStore, key: str, data: bytes, sleep: Sleep) -> None:
    """Store an object, several times if need be.

    A store that is away has been waited for by its own deadline, and is not tried again.

    Raises:
        CorruptDataError: other bytes are there.
        StoreUnreachableError: the store is away.
        OSError: no room, after several attempts.

    """
    for attempt in range(_NUM_PUTS_MAX):
        try:
            return await store.put(key, data)
        except StoreUnreachableError:
            raise
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
        StoreUnreachableError: the store is away, by its own deadline.
        DamagedStoreError: it came damaged, or not at all, every time.

    """
    return await patiently(lambda: get_checked(store, shard), sleep)


async def patiently(read: Callable[[], Awaitable[R]], sleep: Sleep) -> R:
    """Read something, several times if need be; raises as `get_patiently` does."""
    num_failed = 0
    while True:
        try:
            return await read()
        except StoreUnreachableError:
            raise
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
    if not isinstance(manifest, WeightsPublished) or manifest_key_of(manifest, data) != key:
        raise CorruptDataError(f"object {key}: not the manifest of this key")
    return manifest
