"""The folder that a chat works on, and what became of its files.

A user's folder is copied unless `--in-place` says otherwise. Nothing is read through a link, before
or afterwards: a model may have put it there.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

from penstock.actors.monitor.episodes.reading import unified_diff
from penstock.messages.errors import ConfigError, NotFoundError

NUM_FILES_MAX = 20_000
BYTES_MAX = 256 << 20
FILE_BYTES_MAX = 4 << 20
"""Longest file whose text is compared."""


@contextlib.contextmanager
def opened(folder: Path | None, files: Mapping[str, bytes], *, in_place: bool) -> Generator[Path]:
    """Yield a folder to work on: a user's own, a copy of it, or a new one with some files.

    Raises:
        NotFoundError: It is no folder.
        ConfigError: It is too large to copy.

    """
    if folder is not None and not folder.is_dir():
        raise NotFoundError(f"--workspace: {folder}: expected a folder")
    if folder is not None and in_place:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="penstock-chat-", ignore_cleanup_errors=True) as parent:
        place = Path(parent) / "work"
        if folder is not None:
            _copy(folder, place)
        else:
            _write(files, place)
        yield place


class Comparison:
    """A folder's files as they are now, to say later what changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = _contents(folder)

    def diff(self) -> str:
        """Return what changed since, as `diff -u` shows it; links and `.git` are left out."""
        after = _contents(self._folder)
        changed = {path: data for path, data in after.items() if self._before.get(path) != data}
        gone = sorted(self._before.keys() - after.keys())
        unread = [path for path in gone if os.path.lexists(self._folder / path)]
        deleted = [path for path in gone if path not in unread]
        notes = [f"{path}: not compared: too large, too many, or no file" for path in unread]
        return "\n".join(filter(None, [unified_diff(self._before, changed, deleted), *notes]))


def _copy(folder: Path, place: Path) -> None:
    num_bytes = 0
    for number, path in enumerate(_files(folder), 1):
        num_bytes += path.lstat().st_size
        if number > NUM_FILES_MAX or num_bytes > BYTES_MAX:
            limits = f"{NUM_FILES_MAX} files of {BYTES_MAX >> 20} MiB"
            text = f"{folder}: expected at most {limits} to copy; --in-place works on it itself"
            raise ConfigError(f"--workspace: {text}")
    shutil.copytree(folder, place, symlinks=True, ignore=_left_out)


def _left_out(folder: str, names: list[str]) -> list[str]:
    """Return what is not copied: `.git`, which has no bound, sockets, pipes and devices."""
    kinds = {name: stat.S_IFMT(os.lstat(Path(folder) / name).st_mode) for name in names}
    return [
        n
        for n, kind in kinds.items()
        if n == ".git" or kind not in {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK}
    ]


def _write(files: Mapping[str, bytes], place: Path) -> None:
    place.mkdir()
    for name, data in files.items():
        path = place / name
        if not path.resolve().is_relative_to(place.resolve()):
            raise ConfigError(f"{name}: expected a path within the task's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _contents(folder: Path) -> dict[str, bytes]:
    """Return files of at most `FILE_BYTES_MAX` by path, up to the bounds of a copy."""
    found: dict[str, bytes] = {}
    num_bytes = 0
    for path in _files(folder):
        if len(found) >= NUM_FILES_MAX or num_bytes > BYTES_MAX:
            break
        if path.lstat().st_size <= FILE_BYTES_MAX:
            with contextlib.suppress(OSError):  # It may be closed to us.
                data = path.read_bytes()
                found[str(path.relative_to(folder))] = data
                num_bytes += len(data)
    return found


def _files(folder: Path) -> Iterator[Path]:
    """Yield regular files, sorted by folder, but for those of git."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != ".git")
        for name in sorted(names):
            path = Path(root) / name
            if stat.S_ISREG(path.lstat().st_mode):
                yield path
