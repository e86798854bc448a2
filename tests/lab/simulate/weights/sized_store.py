"""An object store whose objects are sizes, and whose transfers take virtual time."""

import asyncio
from bisect import bisect_left, insort
from collections.abc import Sequence

from tests.lab.regions.shaping import Bandwidth
from tests.lab.simulate.weights.transfers import carry

from penstock.messages.errors import CorruptDataError, NotFoundError


class SizedBytes(bytes):
    """A few bytes in place of many: its length is the object's, its digest that of the few."""

    num_bytes: int

    def __new__(cls, content: bytes, num_bytes: int) -> "SizedBytes":
        """Stand for `num_bytes` bytes."""
        made = super().__new__(cls, content)
        made.num_bytes = num_bytes
        return made

    def __len__(self) -> int:
        """Return the length of what it stands for."""
        return self.num_bytes


class Site:
    """The objects of one place, by key; each user reaches it by a `SizedStore` of its own."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._sorted: list[str] = []

    def find(self, key: str) -> bytes | None:
        """Return an object, or None."""
        return self._objects.get(key)

    def add(self, key: str, data: bytes) -> None:
        """Store what is absent."""
        self._objects[key] = data
        insort(self._sorted, key)

    def remove(self, key: str) -> None:
        """Forget an object; absent is fine."""
        if self._objects.pop(key, None) is not None:
            del self._sorted[bisect_left(self._sorted, key)]

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that start with `prefix`, sorted."""
        begin = bisect_left(self._sorted, prefix)
        return self._sorted[begin : bisect_left(self._sorted, prefix + "\U0010ffff", lo=begin)]


class SizedStore:
    """An `ObjectStore`: a site's objects as seen over some links."""

    def __init__(
        self, site: Site, links: Sequence[Bandwidth] = (), *, round_trip_s: float = 0.0
    ) -> None:
        self._site = site
        self._links = links
        self._round_trip_s = round_trip_s

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Store; see `ObjectStore.put`."""
        assert isinstance(data, bytes), "a view would lose the size"
        await carry(self._links, len(data), latency_s=self._round_trip_s)
        found = self._site.find(key)
        if found is None:
            self._site.add(key, data)
        elif found != data:
            raise CorruptDataError(f"object {key!r} is there with other bytes")

    async def get(self, key: str) -> bytes:
        """Return the bytes; see `ObjectStore.get`."""
        if (data := self._site.find(key)) is None:
            raise NotFoundError(f"object {key!r} is not at this site")
        await carry(self._links, len(data), latency_s=self._round_trip_s)
        return data

    async def exists(self, key: str) -> bool:
        """Return whether the object is there."""
        await asyncio.sleep(self._round_trip_s)
        return self._site.find(key) is not None

    async def delete(self, key: str) -> None:
        """Remove it; absent is fine."""
        await asyncio.sleep(self._round_trip_s)
        self._site.remove(key)

    async def keys(self, prefix: str) -> list[str]:
        """List keys that start with `prefix`, sorted."""
        await asyncio.sleep(self._round_trip_s)
        return self._site.keys(prefix)
