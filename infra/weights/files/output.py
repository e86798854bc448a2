"""Files and folders that appear whole, or not at all.

What is written lies beside its place as `.NAME.partial`, locked by its writer, and is renamed when
it is on disk. A writer that was killed leaves only that: the next one takes it over.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from penstock.actors.runtime.files import sync_folder
from penstock.messages.errors import ConfigError, QueueFullError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def new_file(path: Path) -> Generator[BinaryIO]:
    """Open a file that takes the place of `path` when the block ends well.

    Raises:
        QueueFullError: another process is writing the same file.
        OSError: e.g. the disk is full; nothing is left behind.

    """
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name a file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "r+b") as file:
        _lock(descriptor, partial)
        state = os.fstat(descriptor)
        if state.st_uid != os.geteuid() or state.st_nlink != 1:
            raise ConfigError(f"{partial}: another user's file, or a link: remove it")
        file.truncate(0)
        try:
            yield file
            file.flush()
            os.fsync(descriptor)
            partial.replace(path)
        except BaseException as error:
            partial.unlink(missing_ok=True)
            _name_full_disk(error, path)
            raise
    sync_folder(path.parent)


@contextmanager
def new_folder(path: Path) -> Generator[Path]:
    """Yield an empty folder that becomes `path` when the block ends well.

    Raises:
        ConfigError: `path` exists, and is not an empty folder.
        QueueFullError: another process is writing the same folder.
        OSError: e.g. the disk is full; nothing is left behind.

    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path}: exists; name a new folder, or an empty one")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.mkdir(exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _lock(descriptor, partial)
        _empty(partial)
        yield partial
        for folder, _, _ in os.walk(partial):
            sync_folder(Path(folder))
        partial.replace(path)
    except QueueFullError:
        raise
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        _name_full_disk(error, path)
        raise
    finally:
        os.close(descriptor)
    sync_folder(path.parent)


def _name_full_disk(error: BaseException, path: Path) -> None:
    """Name the file that found no room: the system does not for writes to a descriptor."""
    if isinstance(error, OSError) and error.errno in _FULL:
        error.filename = str(path)


def _lock(descriptor: int, partial: Path) -> None:
    """Lock what was opened, and make sure that its last writer has not just renamed it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = partial.stat().st_ino == os.fstat(descriptor).st_ino
    except (BlockingIOError, FileNotFoundError):
        is_ours = False
    if not is_ours:
        raise QueueFullError(f"{partial}: another process is writing it")


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
