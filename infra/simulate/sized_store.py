"""An object store whose objects are sizes, and whose transfers take virtual time."""

import asyncio
from collections.abc import Sequence

from penstock.infra.simulate.wires import Wire, carry
from penstock.messages.errors import CorruptDataError, NotFoundError


class SizedBytes(bytes):
    """A few bytes that stand for many: its length is the object's, its digest that of the few."""

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
    """What one place holds; each user reaches it by a `SizedStore` of its own."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}


class SizedStore:
    """An `ObjectStore`: a site's objects as seen over some wires."""

    def __init__(
        self, site: Site, wires: Sequence[Wire] = (), *, round_trip_s: float = 0.0
    ) -> None:
        self._site = site
        self._wires = wires
        self._round_trip_s = round_trip_s
        self.num_gets = 0

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Store; see `ObjectStore.put`."""
        assert isinstance(data, bytes), "a view would lose the size"
        await carry(self._wires, len(data), latency_s=self._round_trip_s)
        if self._site.objects.setdefault(key, data) != data:
            raise CorruptDataError(f"object {key!r} is there with other bytes")

    async def get(self, key: str) -> bytes:
        """Return the bytes; see `ObjectStore.get`."""
        if key not in self._site.objects:
            raise NotFoundError(f"object {key!r} is not at this site")
        data = self._site.objects[key]
        self.num_gets += 1
        await carry(self._wires, len(data), latency_s=self._round_trip_s)
        return data

    async def exists(self, key: str) -> bool:
        """Tell whether the object is there."""
        await asyncio.sleep(self._round_trip_s)
        return key in self._site.objects

    async def delete(self, key: str) -> None:
        """Remove it; absent is fine."""
        await asyncio.sleep(self._round_trip_s)
        self._site.objects.pop(key, None)

    async def keys(self, prefix: str) -> list[str]:
        """List keys that start with `prefix`, sorted."""
        await asyncio.sleep(self._round_trip_s)
        return sorted(key for key in self._site.objects if key.startswith(prefix))
