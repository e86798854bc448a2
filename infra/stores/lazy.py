"""JetStream object store that connects on first use."""

import asyncio
from collections.abc import Callable

from penstock.infra.bus.jetstream.access import Access
from penstock.infra.stores.jetstream import JetStreamStore


class LazyJetStreamStore:
    """An `ObjectStore` for parts that are built before the server is up."""

    def __init__(self, where: Callable[[], str | Access], bucket: str) -> None:
        """Create without connecting; `where` returns the server and is called on first use."""
        self._where = where
        self._bucket = bucket
        self._opening = asyncio.Lock()
        self._store: JetStreamStore | None = None

    async def close(self) -> None:
        """Disconnect; the next use connects again."""
        async with self._opening:
            store, self._store = self._store, None
        if store is not None:
            await store.close()

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """See `ObjectStore.put`."""
        await (await self._opened()).put(key, data)

    async def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""
        return await (await self._opened()).get(key)

    async def exists(self, key: str) -> bool:
        """See `ObjectStore.exists`."""
        return await (await self._opened()).exists(key)

    async def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        await (await self._opened()).delete(key)

    async def keys(self, prefix: str) -> list[str]:
        """See `ObjectStore.keys`."""
        return await (await self._opened()).keys(prefix)

    async def _opened(self) -> JetStreamStore:
        # Concurrent first uses must share one connection.
        async with self._opening:
            if self._store is None:
                self._store = await JetStreamStore.connect(self._where(), self._bucket)
            return self._store
