"""Atomic file writes, and folders that are their owner's alone."""

import contextlib
import os
import re
import secrets
import tempfile
from pathlib import Path
from typing import IO

from penstock.messages.errors import ConfigError

_SECRET_BYTES = 32
_SECRET_FILE_BYTES_MAX = 4096


def write_atomic(path: Path, data: bytes, *, mode: int = 0o600, is_exclusive: bool = False) -> None:
    """Write so that a reader sees the old bytes or the new ones, whatever happens.

    Args:
        path: The file; its folder is made where it is absent, for its owner alone.
        data: All of it.
        mode: Permissions.
        is_exclusive: Only make the file: of several writers at once, one does.

    Raises:
        FileExistsError: `is_exclusive`, and the file is there.
        OSError: e.g. no space; the old file is untouched and nothing is left behind.

    """
    private_folder(path.parent)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        if is_exclusive:
            path.hardlink_to(temporary)
        else:
            Path(temporary).replace(path)
        sync_folder(path.parent)
    finally:
        Path(temporary).unlink(missing_ok=True)


def create_secret(path: Path) -> bytes:
    """Return the 32 random bytes kept in a file in hex, made there first if it is absent.

    Of several processes that make it at once, one does.

    Raises:
        ConfigError: The file holds anything else.

    """
    if not path.exists():
        with contextlib.suppress(FileExistsError):
            write_atomic(path, f"{secrets.token_hex(_SECRET_BYTES)}\n".encode(), is_exclusive=True)
    return read_secret(path)


def read_secret(path: Path) -> bytes:
    """Return the 32 bytes that a file holds in hex.

    Raises:
        ConfigError: There is no such file, or it holds anything else.

    """
    text = read_small(path, _SECRET_FILE_BYTES_MAX).decode("ascii", "replace").strip()
    if not re.fullmatch(rf"[0-9a-f]{{{2 * _SECRET_BYTES}}}", text):
        raise ConfigError(f"{path}: expected {2 * _SECRET_BYTES} hexadecimal digits")
    return bytes.fromhex(text)


def read_small(path: Path, bytes_max: int) -> bytes:
    """Return the bytes of a file that a setting names; of a pipe, no reading may ever end.

    Raises:
        ConfigError: There is no such file, it is no regular file, or it is longer than that.

    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: expected a file, got a folder, a pipe or a device")
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or type(error).__name__}") from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r}: expected a path") from error
    if len(data) > bytes_max:
        raise ConfigError(f"{path}: expected at most {bytes_max} bytes")
    return data


def private_folder(path: Path) -> None:
    """Make a folder and its missing parents, readable by their owner alone (0700).

    What a run stores are users' texts, hidden tests and credentials.
    """
    if not path.is_dir():
        private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def open_private(path: Path, mode: str) -> IO[bytes]:
    """Open a binary file; a new one is readable by its owner alone (0600)."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
