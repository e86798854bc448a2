"""In-memory object store for simulations."""

from penstock.infra.stores.keys import check_key
from penstock.messages.errors import CorruptDataError, NotFoundError


class MemoryStore:
    """An `ObjectStore` that lives as long as the process."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Store the object; see `ObjectStore.put`."""
        if self._objects.setdefault(check_key(key), bytes(data)) != data:
            raise CorruptDataError(f"object {key!r} already exists with different bytes")

    async def get(self, key: str) -> bytes:
        """Return the bytes; see `ObjectStore.get`."""
        if check_key(key) not in self._objects:
            raise NotFoundError(f"object {key!r} is not in memory")
        return self._objects[key]

    async def exists(self, key: str) -> bool:
        """Return whether the object is there."""
        return check_key(key) in self._objects

    async def delete(self, key: str) -> None:
        """Remove the object if it exists."""
        self._objects.pop(check_key(key), None)

    async def keys(self, prefix: str) -> list[str]:
        """List keys that start with `prefix`, sorted."""
        return sorted(key for key in self._objects if key.startswith(prefix))
