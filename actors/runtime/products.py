"""An on-disk cache of expensive products in the user's cache folder, keyed by input digest.

Any number of processes may use one folder at once: entries are written atomically, and every writer
trims the folder. Each entry is checked against the digest in its name, and a damaged one is deleted
and rebuilt. A missing entry only costs time.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import xxhash

from penstock.actors.runtime.files import write_atomic
from penstock.envs.microvm.images.assets import vm_cache_dir

log = logging.getLogger(__name__)

NUM_MAX = 8
"""Default maximum number of entries per kind of product."""
BYTES_MAX = 1 << 30
"""Default maximum size of all entries of one kind together, in bytes."""
_LEFTOVER_S = 3600.0
"""Age in seconds after which a temporary file is taken to be left by a killed writer."""
_SOURCES = {".py", ".c", ".h", ".cu", ".cuh"}
_PACKAGE = Path(__file__).resolve().parents[2]


class ProductCache:
    """A cache of bytes by key that evicts the least recently used entries.

    Args:
        folder: Folder of this kind of product, below `$PENSTOCK_CACHE` (default
            `~/.cache/penstock`).
        num_max: Maximum number of entries.
        bytes_max: Maximum size of all entries together; a larger entry is never kept.

    """

    def __init__(self, folder: str, num_max: int = NUM_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._folder = vm_cache_dir().parent / folder
        self._num_max, self._bytes_max = num_max, bytes_max

    def get(self, key: str) -> bytes | None:
        """Return an entry; None if there is none or it is damaged."""
        for path in self._folder.glob(f"{key}-*"):
            try:
                data = path.read_bytes()
                if xxhash.xxh3_128_hexdigest(data) == path.name.rpartition("-")[2]:
                    # The modification time is the time of last use, by which entries are evicted.
                    path.touch()
                    return data
                log.warning("cache entry %s is damaged, deleting it", path)
                path.unlink(missing_ok=True)
            except OSError as error:  # E.g. another process evicted it in the meantime.
                log.warning("cannot read cache entry %s: %s", path, error)
        return None

    def put(self, key: str, data: bytes) -> None:
        """Store an entry if the disk and the bounds allow it."""
        if len(data) > self._bytes_max:
            return
        try:
            write_atomic(self._folder / f"{key}-{xxhash.xxh3_128_hexdigest(data)}", data)
            self._trim()
        except OSError as error:
            log.warning("cannot store %d bytes in %s: %s", len(data), self._folder, error)

    def _trim(self) -> None:
        left = self._bytes_max
        for index, (path, num_bytes) in enumerate(self._newest_first()):
            left -= num_bytes
            if index >= self._num_max or left < 0:
                path.unlink(missing_ok=True)

    def _newest_first(self) -> Iterator[tuple[Path, int]]:
        """Yield entries and their sizes in bytes; delete temporary files of killed writers."""
        found: list[tuple[float, Path, int]] = []
        for path in self._folder.iterdir():
            # Another process may evict the entry between the listing and the stat.
            with contextlib.suppress(FileNotFoundError):
                state = path.stat()
                if not path.name.startswith("."):
                    found.append((state.st_mtime, path, state.st_size))
                elif state.st_mtime < time.time() - _LEFTOVER_S:
                    path.unlink()
        for _, path, num_bytes in sorted(found, reverse=True):
            yield path, num_bytes


@cache
def source_digest(*folders: str) -> str:
    """Return the digest of all source files in the given folders of the package."""
    hasher = xxhash.xxh3_128()
    for folder in folders:
        for path in sorted((_PACKAGE / folder).rglob("*.*")):
            if path.suffix in _SOURCES:
                hasher.update(f"{path.relative_to(_PACKAGE)}\0".encode() + path.read_bytes())
    return hasher.hexdigest()
