"""The state of a user's folder besides bytes on this host: modes, links, empty folders."""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.messages.task import FILE_MODE, FOLDER_MODE, FileKind, FileState

ENTRIES_MAX = 100_000
_KINDS = {
    stat.S_IFREG: FileKind.FILE,
    stat.S_IFDIR: FileKind.FOLDER,
    stat.S_IFLNK: FileKind.LINK,
    stat.S_IFIFO: FileKind.PIPE,
}


def folder_states(folder: Path) -> dict[bytes, FileState]:
    """Return the states of a folder's files without git's, at most `ENTRIES_MAX`.

    Non-empty folders are included only if they have an unusual mode.
    """
    found: dict[bytes, FileState] = {}
    first: dict[int, bytes] = {}
    for path in _walk(folder):
        info = path.lstat()
        name = os.fsencode(path.relative_to(folder))
        kind = _KINDS.get(stat.S_IFMT(info.st_mode))
        if kind is None:
            continue
        mode, target = stat.S_IMODE(info.st_mode), b""
        if kind is FileKind.LINK:
            mode, target = FILE_MODE, os.fsencode(path.readlink())
        is_linked = kind is FileKind.FILE and info.st_nlink > 1
        if is_linked and (same := first.setdefault(info.st_ino, name)) != name:
            kind, mode, target = FileKind.HARD_LINK, FILE_MODE, same
        if kind is FileKind.FOLDER and mode == FOLDER_MODE and _is_filled(path):
            continue
        found[name] = FileState(path=name, kind=kind, mode=mode, target=target)
        if len(found) >= ENTRIES_MAX:
            break
    return found


def changed_states(
    before: Mapping[bytes, FileState], after: Mapping[bytes, FileState]
) -> list[FileState]:
    """Return the changed states; new and deleted regular files are not included."""
    changed = [
        one
        for path, one in sorted(after.items())
        if one != before.get(path) and not (path not in before and one == FileState(path=path))
    ]
    gone = [
        FileState(path=path, kind=FileKind.GONE)
        for path, one in sorted(before.items())
        if path not in after and one.kind not in {FileKind.FILE, FileKind.HARD_LINK}
    ]
    return changed + gone


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != ".git")
        yield from (Path(root, name) for name in [*folders, *sorted(names)])


def _is_filled(path: Path) -> bool:
    try:
        with os.scandir(path) as entries:
            return any(True for _ in entries)
    except OSError:
        return True  # A folder without read permission, whose content is unknown.
