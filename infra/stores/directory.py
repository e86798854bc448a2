"""Objects as files of one folder, on one machine or a shared file system."""

import asyncio
import contextlib
import re
from pathlib import Path

from penstock.actors.runtime.files import write_atomic
from penstock.messages.errors import ConfigError, CorruptDataError, NotFoundError

_KEY = re.compile(r"(?!\.)[A-Za-z0-9._=+\-]+(/(?!\.)[A-Za-z0-9._=+\-]+)*")


class DirectoryStore:
    """An `ObjectStore`: key `a/b/c` is the file `root/a/b/c`, written once, atomically."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Store, synced to disk; see `ObjectStore.put`."""
        await asyncio.to_thread(self._put, key, data)

    async def get(self, key: str) -> bytes:
        """Read the whole object; see `ObjectStore.get`."""
        path = self._path(key)
        try:
            return await asyncio.to_thread(path.read_bytes)
        except (FileNotFoundError, IsADirectoryError) as error:
            raise NotFoundError(f"object {key!r} is not in {self._root}") from error

    async def exists(self, key: str) -> bool:
        """Tell whether the object is there."""
        return await asyncio.to_thread(self._path(key).is_file)

    async def delete(self, key: str) -> None:
        """Remove it; absent is fine."""
        await asyncio.to_thread(self._path(key).unlink, missing_ok=True)

    async def keys(self, prefix: str) -> list[str]:
        """List keys that start with `prefix`, sorted; half-written files are not listed."""
        return await asyncio.to_thread(self._keys, prefix)

    def _path(self, key: str) -> Path:
        """Names with a leading dot are refused: `..`, and the temporary files."""
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"object key: expected names of letters, digits, '._=+-' joined by '/', got {key!r}"
            )
        return self._root / key

    def _put(self, key: str, data: bytes | memoryview) -> None:
        path = self._path(key)
        if not path.is_file():
            with contextlib.suppress(FileExistsError):  # Another writer was quicker.
                return write_atomic(path, bytes(data), is_exclusive=True)
        if path.read_bytes() != data:
            raise CorruptDataError(f"object {key!r} is in {self._root} with other bytes")

    def _keys(self, prefix: str) -> list[str]:
        files = (path for path in self._root.rglob("*") if path.is_file())
        keys = (path.relative_to(self._root).as_posix() for path in files)
        return sorted(key for key in keys if key.startswith(prefix) and _KEY.fullmatch(key))
