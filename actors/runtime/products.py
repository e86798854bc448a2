"""Products that are worth keeping: in the user's cache, by the digest of what they are made of.

Any number of processes may use one folder at once: entries are written atomically, and who writes
also trims. An entry is checked against the digest in its name; a damaged one is deleted and made
again. Nothing depends on an entry but time.
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
BYTES_MAX = 1 << 30
_LEFTOVER_S = 3600.0
_SOURCES = {".py", ".c", ".h", ".cu", ".cuh"}
_PACKAGE = Path(__file__).resolve().parents[2]


class ProductCache:
    """Bytes by key, the least recently used of them trimmed.

    Args:
        folder: Of one kind of product, below `$PENSTOCK_CACHE`, by default `~/.cache/penstock`.
        num_max: Entries.
        bytes_max: Of all entries together; what is larger alone is not kept.

    """

    def __init__(self, folder: str, num_max: int = NUM_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._folder = vm_cache_dir().parent / folder
        self._num_max, self._bytes_max = num_max, bytes_max

    def get(self, key: str) -> bytes | None:
        """Return an entry; None where there is none, or only a damaged one."""
        for path in self._folder.glob(f"{key}-*"):
            try:
                data = path.read_bytes()
                if xxhash.xxh3_128_hexdigest(data) == path.name.rpartition("-")[2]:
                    path.touch()
                    return data
                log.warning("%s: is damaged, and made again", path)
                path.unlink(missing_ok=True)
            except OSError as error:  # Trimmed meanwhile, say.
                log.warning("%s: %s", path, error)
        return None

    def put(self, key: str, data: bytes) -> None:
        """Keep an entry, if the disk and the bounds allow it."""
        if len(data) > self._bytes_max:
            return
        try:
            write_atomic(self._folder / f"{key}-{xxhash.xxh3_128_hexdigest(data)}", data)
            self._trim()
        except OSError as error:
            log.warning("%s: not kept: %s", self._folder, error)

    def _trim(self) -> None:
        left = self._bytes_max
        for index, (path, num_bytes) in enumerate(self._newest_first()):
            left -= num_bytes
            if index >= self._num_max or left < 0:
                path.unlink(missing_ok=True)

    def _newest_first(self) -> Iterator[tuple[Path, int]]:
        """Yield entries and their sizes; delete what writers left that were killed."""
        found: list[tuple[float, Path, int]] = []
        for path in self._folder.iterdir():
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
    """Return the digest of all code in some folders of the package."""
    hasher = xxhash.xxh3_128()
    for folder in folders:
        for path in sorted((_PACKAGE / folder).rglob("*.*")):
            if path.suffix in _SOURCES:
                hasher.update(f"{path.relative_to(_PACKAGE)}\0".encode() + path.read_bytes())
    return hasher.hexdigest()
