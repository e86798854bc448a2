"""The files of a task's folder, read with bounds: a stranger's, so anything may be in it.

A device, a path that leads through a link out of the folder, too many files or bytes, folders too
deep: each is one error that names the file. Links within it are links: nothing follows them.
"""

import contextlib
import os
import posixpath
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from penstock.messages.errors import PenstockError
from penstock.messages.task import FILE_MODE, FOLDER_MODE, FileKind, FileState

FILES_MAX = 2_000
"""Files of one folder; as many folders below it."""
BYTES_MAX = 8 << 20
DEPTH_MAX = 32
SETTINGS_BYTES_MAX = 256 << 10


class TaskImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image that a task needs: one to pull, or one to build."""

    reference: str = ""
    folder: Path = Path()
    """Without a reference: the folder of the Dockerfile."""
    name: str = ""
    """Name of the image that is built there."""
    hidden: tuple[str, ...] = ()
    """Files directly in that folder that are not the agent's: no image may have them."""


class MalformedTaskError(PenstockError, ValueError):
    """A task is not as its format asks; the text names the file and what was expected.

    Args:
        reasons: All that is known to be wrong.
        image: The image without which nothing else is wrong but that it is not here.

    """

    def __init__(self, *reasons: str, image: TaskImage | None = None) -> None:
        super().__init__("\n".join(reasons))
        self.reasons = reasons
        self.image = image


Tree = dict[str, FileState]
"""Files below a folder by their path in it, all with their data; no UTF-8 is escaped in paths."""


def read_tree(folder: Path, below: str) -> Tree:
    """Return what a folder holds, sorted by path.

    Args:
        folder: Of the task.
        below: The folder in it.

    Raises:
        MalformedTaskError: See the module.

    """
    base = folder / below
    _check_inside(base, folder)
    if not base.is_dir():
        raise MalformedTaskError(f"{base}: expected a folder")
    # In read-only storage everything is read-only, which says nothing about the task's files.
    added = 0 if folder.stat().st_mode & stat.S_IWUSR else stat.S_IWUSR
    tree: Tree = {}
    first: dict[int, bytes] = {}
    num_bytes = 0
    for path in sorted(_files(base)):
        name = path.relative_to(base).as_posix()
        shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "ignore")
        if not shown.isprintable():
            raise MalformedTaskError(f"{base}: expected printable file names, got {name!a}")
        info = path.lstat()
        state = FileState(path=os.fsencode(name), mode=stat.S_IMODE(info.st_mode) | added)
        if stat.S_ISLNK(info.st_mode):
            target = os.fsencode(path.readlink())
            state = FileState(path=state.path, kind=FileKind.LINK, target=target)
        elif stat.S_ISDIR(info.st_mode):
            state = msgspec.structs.replace(state, kind=FileKind.FOLDER)
        elif info.st_nlink > 1 and first.setdefault(info.st_ino, state.path) != state.path:
            same = first[info.st_ino]
            state = FileState(path=state.path, kind=FileKind.HARD_LINK, target=same)
        else:
            data = _read(folder, f"{below}/{name}", BYTES_MAX)
            state = msgspec.structs.replace(state, data=data)
            num_bytes += len(data)
        tree[name] = state
        if num_bytes > BYTES_MAX:
            raise MalformedTaskError(f"{base}: more than {BYTES_MAX} bytes")
    return tree


def plain_tree(files: Mapping[str, bytes], mode: int = FILE_MODE) -> Tree:
    """Return a tree of regular files."""
    return {
        path: FileState(path=os.fsencode(path), mode=mode, data=data)
        for path, data in files.items()
    }


def below(place: str, tree: Tree) -> Tree:
    """Return a tree below another place."""
    moved: Tree = {}
    for name, one in tree.items():
        target = one.target
        if one.kind is FileKind.HARD_LINK:
            target = os.fsencode(posixpath.join(place, os.fsdecode(target)))
        path = posixpath.join(place, name)
        moved[path] = msgspec.structs.replace(one, path=os.fsencode(path), target=target)
    return moved


class TreeParts(msgspec.Struct, frozen=True, kw_only=True):
    """A tree as tasks hold it."""

    files: dict[str, str] = {}
    binaries: dict[str, bytes] = {}
    states: list[FileState] = []


def split_tree(tree: Tree) -> TreeParts:
    """Return the texts, the other files with UTF-8 names, and what their bytes do not say."""
    contents: dict[str, bytes] = {}
    states: list[FileState] = []
    holding = {folder for name in tree for folder in _above(name)}
    for name, one in sorted(tree.items()):
        state = one
        if one.kind is FileKind.FILE and one.name is not None:
            contents[name] = one.data or b""
            state = msgspec.structs.replace(one, data=None)
        is_plain = state == FileState(path=one.path)
        is_implied = one.kind is FileKind.FOLDER and one.mode == FOLDER_MODE and name in holding
        if not (is_plain or is_implied):
            states.append(state)
    files, binaries = split_texts(contents)
    return TreeParts(files=files, binaries=binaries, states=states)


def _above(name: str) -> Iterator[str]:
    while (name := posixpath.dirname(name)) not in {"", "/"}:
        yield name


def read_text(folder: Path, name: str, bytes_max: int = BYTES_MAX) -> str:
    """Return one file of a task's folder, which must be a text; raises as `read_tree` does."""
    try:
        return _read(folder, name, bytes_max).decode()
    except UnicodeDecodeError as error:
        raise MalformedTaskError(f"{folder / name}: expected UTF-8 text: {error}") from error


def read_instruction(folder: Path, name: str) -> str:
    """Return an instruction, which must not be blank; raises as `read_tree` does."""
    text = read_text(folder, name)
    if not text.strip():
        raise MalformedTaskError(f"{folder / name}: expected an instruction, it is empty")
    return text.removesuffix("\n")


def split_texts(files: Mapping[str, bytes]) -> tuple[dict[str, str], dict[str, bytes]]:
    """Return the files that are UTF-8 texts, and those that are not."""
    texts: dict[str, str] = {}
    for path, data in files.items():
        with contextlib.suppress(UnicodeDecodeError):
            texts[path] = data.decode()
    return texts, {path: data for path, data in files.items() if path not in texts}


def _read(folder: Path, name: str, bytes_max: int) -> bytes:
    path = folder / name
    _check_inside(path, folder)
    try:
        data = _first_bytes(path, bytes_max + 1) if path.is_file() else None
    except OSError as error:
        raise MalformedTaskError(f"{str(path)!a}: {error}") from error
    if data is None:
        raise MalformedTaskError(f"{path}: expected a file")
    if len(data) > bytes_max:
        raise MalformedTaskError(f"{path}: expected at most {bytes_max} bytes")
    return data


def _first_bytes(path: Path, num_max: int) -> bytes:
    with path.open("rb") as file:
        return file.read(num_max)


def _files(base: Path) -> Iterator[Path]:
    """Yield the files below a folder; follows no link, and stops at the bounds."""
    waiting, num_files, num_folders = [base], 0, 0
    while waiting:
        folder = waiting.pop()
        num_folders += 1
        if len(folder.relative_to(base).parts) > DEPTH_MAX:
            raise MalformedTaskError(f"{base}: folders deeper than {DEPTH_MAX}")
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    path = folder / entry.name
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(path)
                    elif not (entry.is_file(follow_symlinks=False) or entry.is_symlink()):
                        raise MalformedTaskError(f"{str(path)!a}: expected a file, folder or link")
                    num_files += 1
                    if max(num_files, num_folders, len(waiting)) > FILES_MAX:
                        raise MalformedTaskError(f"{base}: more than {FILES_MAX} files or folders")
                    yield path
        except OSError as error:
            raise MalformedTaskError(f"{str(folder)!a}: {error}") from error
        if max(num_folders, len(waiting)) > FILES_MAX:
            raise MalformedTaskError(f"{base}: more than {FILES_MAX} files or folders")


def _check_inside(path: Path, folder: Path) -> None:
    """Refuse a path that is a link, or that has one on its way below the task's folder."""
    try:
        is_outside = path.is_symlink() or path.resolve() != folder.resolve() / path.relative_to(
            folder
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise MalformedTaskError(f"{str(path)!a}: {error}") from error
    if is_outside:
        raise MalformedTaskError(f"{path}: a link, or out of the task's folder")
