"""Atomic file writes, secrets in files, and folders that only their owner can read."""

import contextlib
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import IO

from penstock.messages.errors import ConfigError

log = logging.getLogger(__name__)

_SECRET_BYTES = 32
_SECRET_FILE_BYTES_MAX = 4096


def write_atomic(path: Path, data: bytes, *, mode: int = 0o600, is_exclusive: bool = False) -> None:
    """Write a file atomically: a reader sees either the old bytes or the new ones.

    Args:
        path: The file; a missing folder is created, readable only by its owner.
        data: The new content.
        mode: Permission bits.
        is_exclusive: Create the file, never replace one: of several concurrent writers one wins.

    Raises:
        FileExistsError: `is_exclusive` is set and the file exists.
        OSError: e.g. no space; the old file is untouched and no temporary file remains.

    """
    private_folder(path.parent)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            # Data before name: after a power cut the name must not point to an empty file.
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        # A hard link fails if the name exists, atomically; a rename would replace the file.
        if is_exclusive:
            path.hardlink_to(temporary)
        else:
            Path(temporary).replace(path)
        sync_folder(path.parent)
    finally:
        Path(temporary).unlink(missing_ok=True)


def create_secret(path: Path) -> bytes:
    """Return the 32-byte secret in a file (as hex digits); create it if there is none.

    If several processes create it concurrently, all get the same secret.

    Raises:
        ConfigError: The file holds anything else.

    """
    if not path.exists():
        # Another process may create it after the check; then its secret is the one to read.
        with contextlib.suppress(FileExistsError):
            write_atomic(path, f"{secrets.token_hex(_SECRET_BYTES)}\n".encode(), is_exclusive=True)
            log.info("created secret %s", path)
    return read_secret(path)


def read_secret(path: Path) -> bytes:
    """Return the secret that a file holds: one to three lines of 64 hex digits, 32 bytes each.

    Raises:
        ConfigError: There is no such file, or it holds anything else.

    """
    text = read_small(path, _SECRET_FILE_BYTES_MAX).decode("ascii", "replace").strip()
    if not re.fullmatch(rf"([0-9a-f]{{{2 * _SECRET_BYTES}}}\n?){{1,3}}", text):
        raise ConfigError(f"{path}: expected {2 * _SECRET_BYTES} hexadecimal digits")
    return bytes.fromhex(text)


def read_small(path: Path, bytes_max: int) -> bytes:
    """Return the content of a small file that a setting names.

    Raises:
        ConfigError: There is no such file, it is not a regular file, or it exceeds `bytes_max`.

    """
    # Reading a pipe might never end.
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: expected a file, got a folder, a pipe or a device")
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or type(error).__name__}") from error
    # A path with a null byte.
    except ValueError as error:
        raise ConfigError(f"{str(path)!r}: expected a path") from error
    if len(data) > bytes_max:
        raise ConfigError(f"{path}: expected at most {bytes_max} bytes")
    return data


def private_folder(path: Path) -> None:
    """Create a folder and its missing parents, accessible only to their owner (0700).

    A run stores users' texts, hidden tests and credentials.
    """
    # Not `mkdir(parents=True)`: that ignores the mode for the parents.
    if not path.is_dir():
        private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def open_private(path: Path, mode: str) -> IO[bytes]:
    """Open a binary file; a new one is accessible only to its owner (0600)."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


@contextlib.contextmanager
def new_private_file(path: Path) -> Generator[IO[bytes], None, None]:
    """Yield a file of its owner alone that takes the place of `path` when the block ends well.

    Its name until then is random and new: nobody else can lay a file or a link in wait.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
        sync_folder(path.parent)
    finally:
        Path(temporary).unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to disk, so that they survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
