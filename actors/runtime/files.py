"""Atomic file writes."""

import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644, is_exclusive: bool = False) -> None:
    """Write so that a reader sees the old bytes or the new ones, whatever happens.

    Args:
        path: The file; its folder is made where it is absent.
        data: All of it.
        mode: Permissions.
        is_exclusive: Only make the file: of several writers at once, one does.

    Raises:
        FileExistsError: `is_exclusive`, and the file is there.
        OSError: e.g. no space; the old file is untouched and nothing is left behind.

    """
    path.parent.mkdir(parents=True, exist_ok=True)
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


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
