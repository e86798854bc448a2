"""Objects and manifests in and out of a store: checked, retried, as many at once as pay off."""

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

_log = logging.getLogger(__name__)
_PUT_RETRY = RetryPolicy(num_attempts_max=6, pause_s=0.25, pause_s_max=4.0)
_GET_RETRY = RetryPolicy(num_attempts_max=5, pause_s=0.4, pause_s_max=3.2)
WINDOW_BYTES = 1 << 30
"""Bytes of one version in flight at once: what 100 Gbit/s carry in 86 ms. Objects that have arrived
are held in addition."""
NUM_TRANSFERS_MIN = 8
"""In flight at once however large they are, so that a link is not idle for a round trip between
two objects."""
NUM_TRANSFERS_MAX = 64
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
        await with_retries(
            lambda: self.store.put(key, data),
            _PUT_RETRY,
            retry_on=(OSError,),
            is_final=_is_away,
            sleep=self.sleep,
            log=_log,
        )

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
        try:
            return await with_retries(
                attempt,
                _GET_RETRY,
                retry_on=(CorruptDataError, NotFoundError, OSError),
                is_final=_is_away,
                sleep=self.sleep,
                log=_log,
            )
        except StoreUnreachableError:
            raise
        except (CorruptDataError, NotFoundError, OSError) as error:
            text = f"after {_GET_RETRY.num_attempts_max} attempts: {error}"
            raise DamagedStoreError(text) from error


def _is_away(error: Exception) -> bool:
    return isinstance(error, StoreUnreachableError)


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


class _Window:
    """Room for bytes, given in the order of arrival; an object takes 1/64 to 1/8 of it."""

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


async def gather_bounded(
    work: Iterable[Coroutine[Any, Any, R]], sizes: Iterable[int] | None = None
) -> list[R]:
    """Run coroutines concurrently, from 8 to 64 of them, as many as the window has room for.

    A link of long delay takes many objects at once, until together they fill it. The first failure
    cancels the others.

    Args:
        work: Coroutines, started in this order.
        sizes: Bytes that each one moves; without them, only 8 run at once.

    Returns:
        The results, in order.

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
        for coroutine in coroutines:
            coroutine.close()  # those that never started


async def for_each_shard(
    act: Callable[[ShardRef], Coroutine[Any, Any, R]], shards: Sequence[ShardRef]
) -> list[R]:
    """Act on every object of a version, as many at once as the window has room for."""
    return await gather_bounded(map(act, shards), (shard.num_bytes for shard in shards))
