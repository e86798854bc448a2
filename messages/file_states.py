"""What a file is besides its bytes: kind, mode, target, time, and a name that is no UTF-8."""

from enum import StrEnum
from typing import Annotated

import msgspec

from penstock.messages.settings import NonNegativeInt

FILE_MODE, FOLDER_MODE = 0o644, 0o755
"""Modes that need no state: those with which a machine writes files and folders."""
PATH_BYTES_MAX = 4_096


class FileKind(StrEnum):
    """Kind of a file."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    HARD_LINK = "hard_link"
    PIPE = "pipe"
    GONE = "gone"
    """Was there before: a folder, a link, or a file whose name is no UTF-8."""


class FileState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file, as far as a map from paths to bytes does not say it.

    Such a map has the bytes of regular files with UTF-8 names; without a state they have the mode
    `FILE_MODE`, and the folders above them `FOLDER_MODE`.
    """

    path: Annotated[bytes, msgspec.Meta(min_length=1, max_length=PATH_BYTES_MAX)]
    """Relative to the working directory, or absolute."""
    kind: FileKind = FileKind.FILE
    mode: Annotated[int, msgspec.Meta(ge=0, le=0o7777)] = FILE_MODE
    target: bytes = b""
    """Text of a link; path of the file that a hard link is the same as."""
    data: bytes | None = None
    """Content of a file whose name is no UTF-8."""
    hole_bytes: NonNegativeInt = 0
    """Length of a file that is one hole: zeros that take no space and are not carried."""
    mtime_ns: int | None = None
    """Time of last change since 1970, where a program set it; else it is when it was written."""

    @property
    def name(self) -> str | None:
        """The path as text; None if it is no UTF-8."""
        try:
            return self.path.decode()
        except UnicodeDecodeError:
            return None

    @property
    def shown(self) -> str:
        """One line for people: kind, mode, and what else there is."""
        words = [self.kind.value]
        if self.kind in {FileKind.FILE, FileKind.FOLDER, FileKind.PIPE}:
            words.append(f"mode {self.mode:04o}")
        if self.target:
            words.append(f"-> {self.target.decode('utf-8', 'backslashreplace')}")
        if self.data is not None or self.hole_bytes:
            words.append(f"{self.hole_bytes or len(self.data or b'')} bytes")
        if self.mtime_ns is not None:
            words.append(f"time {self.mtime_ns / 1e9:.0f}")
        return f"{self.path.decode('utf-8', 'backslashreplace')}: {', '.join(words)}"
