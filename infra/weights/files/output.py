"""Writes files and folders atomically.

Output is written to `.NAME.partial`, locked by its writer, and renamed once it is on disk. A killed
writer leaves only that file, which the next writer reuses.
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
    """Open a file that replaces `path` when the block ends without an error.

    Raises:
        QueueFullError: Another process is writing the same file.
        OSError: Writing failed, e.g. because the disk is full; nothing is left behind.

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
        # The rest of a killed writer may be longer than the new content.
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
    """Yield an empty folder that becomes `path` when the block ends without an error.

    Raises:
        ConfigError: `path` exists and is not an empty folder.
        QueueFullError: Another process is writing the same folder.
        OSError: Writing failed, e.g. because the disk is full; nothing is left behind.

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
        # Names in folders reach the disk only when the folders do.
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
    # The system does not name the file for writes to a descriptor.
    if isinstance(error, OSError) and error.errno in _FULL:
        error.filename = str(path)


def _lock(descriptor: int, partial: Path) -> None:
    # Between opening and locking, the previous writer may have renamed the file: then the lock is
    # on its result, and the name `partial` is gone or means another file.
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
