"""The files of a task's folder, read with bounds: a stranger's, so anything may be in it.

A link, a device, a path out of the folder, a name that is no UTF-8, too many files or bytes,
folders too deep: each is one error that names the file.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from penstock.messages.errors import PenstockError

FILES_MAX = 2_000
"""Files of one folder; as many folders below it."""
BYTES_MAX = 8 << 20
DEPTH_MAX = 32
SETTINGS_BYTES_MAX = 256 << 10


class MalformedTaskError(PenstockError, ValueError):
    """A task's folder is not as the format asks; the text names the file and what was expected."""


def read_tree(folder: Path, below: str) -> dict[str, bytes]:
    """Return the contents of a folder's files by their path in it, sorted.

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
    files: dict[str, bytes] = {}
    num_bytes = 0
    for path in sorted(_files(base)):
        name = str(PurePosixPath(path.relative_to(base)))
        if not name.isprintable():
            raise MalformedTaskError(f"{base}: expected printable file names, got {name!a}")
        files[name] = _read(folder, f"{below}/{name}", BYTES_MAX)
        num_bytes += len(files[name])
        if num_bytes > BYTES_MAX:
            raise MalformedTaskError(f"{base}: more than {BYTES_MAX} bytes")
    return files


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
                        continue
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
