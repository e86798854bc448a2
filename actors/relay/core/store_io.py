"""Transfers objects and manifests to and from a store, with checks, retries and concurrency."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

from blake3 import blake3

from penstock.actors.relay.core.objects import manifest_key, manifest_key_of
from penstock.messages import codec
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import (
    CorruptDataError,
    NotFoundError,
    PenstockError,
    StoreUnreachableError,
)
from penstock.messages.retries import RetryPolicy, with_retries
from penstock.messages.weights import ShardRef, WeightsPublished

log = logging.getLogger(__name__)
_PUT_RETRY = RetryPolicy(num_attempts_max=6, pause_s=0.25, pause_s_max=4.0)
_GET_RETRY = RetryPolicy(num_attempts_max=5, pause_s=0.4, pause_s_max=3.2)
WINDOW_BYTES = 1 << 30
"""Bytes of one version in flight at once, as much as 100 Gbit/s carry in 86 ms; objects that have
arrived are not included."""
NUM_TRANSFERS_MIN = 8
"""Number of transfers at once even if they are large, so that the link does not idle for a round
trip between two objects."""
NUM_TRANSFERS_MAX = 64
"""Number of transfers at once even if they are small."""
R = TypeVar("R")


class DamagedStoreError(PenstockError, OSError):
    """A store repeatedly returned a damaged object, or none."""


class StoreIO(NamedTuple):
    """A store together with the means to wait and to run blocking work."""

    store: ObjectStore
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    """Function that waits between attempts."""
    offload: Callable[..., Awaitable[Any]] = asyncio.to_thread
    """Function that runs blocking work; under a simulated clock it must not use threads."""

    async def put(self, key: str, data: bytes) -> None:
        """Store an object whose key contains its hash, replacing damaged bytes.

        Raises:
            OSError: The store has no room, after several attempts.

        """
        try:
            await self.put_once(key, data)
        except CorruptDataError:
            # The key contains the hash of the data, so any other bytes under it are damaged.
            log.warning("replacing damaged object %s", key)
            await self.store.delete(key)
            await self.put_once(key, data)

    async def put_once(self, key: str, data: bytes) -> None:
        """Store an object under an unused key, with retries.

        Raises:
            CorruptDataError: The key already has other bytes.
            StoreUnreachableError: The store cannot be reached.
            OSError: The store has no room, after several attempts.

        """
        await with_retries(
            lambda: self.store.put(key, data),
            _PUT_RETRY,
            retry_on=(OSError,),
            # The store's client has already retried until its own deadline.
            is_final=_is_unreachable,
            sleep=self.sleep,
            log=log,
        )

    async def put_manifest(self, manifest: WeightsPublished) -> None:
        """Store the manifest of a version whose objects are stored; raise as `put` does."""
        await self.put(manifest_key(manifest), codec.encode(manifest))

    async def get(self, shard: ShardRef) -> bytes:
        """Fetch one object; raise as `read` does."""
        return await self.read(lambda: get_checked(self.store, shard))

    async def read(self, attempt: Callable[[], Awaitable[R]]) -> R:
        """Retry a read until it succeeds.

        Raises:
            StoreUnreachableError: The store cannot be reached.
            DamagedStoreError: The object was damaged or missing in every attempt.

        """
        try:
            return await with_retries(
                attempt,
                _GET_RETRY,
                retry_on=(CorruptDataError, NotFoundError, OSError),
                is_final=_is_unreachable,
                sleep=self.sleep,
                log=log,
            )
        except StoreUnreachableError:
            raise
        except (CorruptDataError, NotFoundError, OSError) as error:
            text = f"after {_GET_RETRY.num_attempts_max} attempts: {error}"
            raise DamagedStoreError(text) from error


def _is_unreachable(error: Exception) -> bool:
    return isinstance(error, StoreUnreachableError)


async def get_checked(store: ObjectStore, shard: ShardRef) -> bytes:
    """Fetch one object without retries.

    Raises:
        CorruptDataError: The object's size or blake3 differs from the manifest's.
        NotFoundError: The store does not have the object.

    """
    data = await store.get(shard.object_key)
    if len(data) != shard.num_bytes or blake3(data).hexdigest() != shard.blake3:
        raise CorruptDataError(
            f"object {shard.object_key}: expected {shard.num_bytes} bytes with blake3"
            f" {shard.blake3}, got {len(data)} others"
        )
    return data


async def read_manifest(store: ObjectStore, key: str) -> WeightsPublished:
    """Read one manifest without retries.

    Raises:
        CorruptDataError: The object is not a manifest, or belongs under another key.
        NotFoundError: The store does not have the object.

    """
    data = await store.get(key)
    try:
        manifest = codec.decode(data)
    except ValueError as error:
        raise CorruptDataError(f"object {key}: not a manifest: {error}") from error
    if not isinstance(manifest, WeightsPublished) or manifest_key_of(manifest, data) != key:
        raise CorruptDataError(f"object {key}: not the manifest that belongs under this key")
    return manifest


class _Window:
    """Limit on the bytes in flight; each transfer takes 1/64 to 1/8 of it."""

    def __init__(self) -> None:
        self._num_free = WINDOW_BYTES
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()

    @asynccontextmanager
    async def room(self, num_bytes: int) -> AsyncGenerator[None]:
        least, most = WINDOW_BYTES // NUM_TRANSFERS_MAX, WINDOW_BYTES // NUM_TRANSFERS_MIN
        taken = min(max(num_bytes, least), most)
        # Only the first in line waits for room; otherwise small objects would overtake a large one
        # forever. The lock is fair, so transfers start in the order of arrival.
        async with self._turn:
            while self._num_free < taken:
                self._released.clear()
                await self._released.wait()
            self._num_free -= taken
        try:
            yield
        finally:
            self._num_free += taken
            self._released.set()


async def gather_bounded(
    work: Iterable[Coroutine[Any, Any, R]], sizes: Iterable[int] | None = None
) -> list[R]:
    """Run coroutines concurrently, 8 to 64 at once, as many as the window of bytes allows.

    The first failure cancels the others.

    Args:
        work: Coroutines, started in this order.
        sizes: Number of bytes that each coroutine transfers; without sizes, 8 run at once.

    Returns:
        Results in the order of `work`.

    """
    window = _Window()

    async def run(coroutine: Coroutine[Any, Any, R], num_bytes: int) -> R:
        async with window.room(num_bytes):
            return await coroutine

    coroutines = list(work)
    sizes = repeat(WINDOW_BYTES) if sizes is None else sizes
    tasks = [asyncio.ensure_future(run(*pair)) for pair in zip(coroutines, sizes, strict=False)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Python warns about coroutines that were never awaited, as those still waiting for room.
        for coroutine in coroutines:
            coroutine.close()


async def for_each_shard(
    act: Callable[[ShardRef], Coroutine[Any, Any, R]], shards: Sequence[ShardRef]
) -> list[R]:
    """Apply a function to every object of a version, as many at once as the window allows."""
    return await gather_bounded(map(act, shards), (shard.num_bytes for shard in shards))
