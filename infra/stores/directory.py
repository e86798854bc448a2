"""Object store in one folder, on a local or a shared file system."""

import asyncio
import contextlib
import errno
from pathlib import Path

from penstock.actors.runtime.files import write_atomic
from penstock.infra.stores.keys import check_key, is_key
from penstock.messages.errors import CorruptDataError, NotFoundError, StoreFullError

_FULL = {errno.ENOSPC, errno.EDQUOT}


class DirectoryStore:
    """An `ObjectStore`: key `a/b/c` is the file `root/a/b/c`, written once, atomically."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Store the object, synced to disk; see `ObjectStore.put`."""
        # In a thread, like every operation here: an fsync would stall the event loop.
        await asyncio.to_thread(self._put, key, data)

    async def get(self, key: str) -> bytes:
        """Read the whole object; see `ObjectStore.get`."""
        path = self._path(key)
        try:
            return await asyncio.to_thread(path.read_bytes)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise NotFoundError(f"object {key!r} is not in {self._root}") from error

    async def exists(self, key: str) -> bool:
        """Return whether the object is there."""
        return await asyncio.to_thread(self._path(key).is_file)

    async def delete(self, key: str) -> None:
        """Remove the object if it exists."""
        await asyncio.to_thread(self._path(key).unlink, missing_ok=True)

    async def keys(self, prefix: str) -> list[str]:
        """List keys that start with `prefix`, sorted; half-written files are not listed."""
        return await asyncio.to_thread(self._keys, prefix)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _put(self, key: str, data: bytes | memoryview) -> None:
        path = self._path(key)
        if not path.is_file():
            # Another writer may create the file between the check and the write: compare bytes.
            try:
                with contextlib.suppress(FileExistsError):
                    return write_atomic(path, bytes(data), is_exclusive=True)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                raise StoreFullError(f"object {key!r}: {error}") from error
        if path.read_bytes() != data:
            raise CorruptDataError(
                f"object {key!r} already exists in {self._root} with different bytes"
            )

    def _keys(self, prefix: str) -> list[str]:
        folder = prefix.rpartition("/")[0]
        if folder and not is_key(folder):
            return []
        files = (path for path in (self._root / folder).rglob("*") if path.is_file())
        keys = (path.relative_to(self._root).as_posix() for path in files)
        return sorted(key for key in keys if key.startswith(prefix) and is_key(key))
