"""Messages between the host and a guest's agent, and their bounds.

A frame is u32 little-endian length + a msgpack map: a `GuestRequest`, or a `GuestReply`.
"""

import secrets
from collections.abc import Callable
from typing import Annotated, Literal, Self

import msgspec

VERSION = 1
WINDOW_BYTES = 3000
REQUEST_BYTES_MAX = 1 << 20
REPLY_BYTES_MAX = (2 << 20) + 8192
REQUESTS_MAX = 256
OUTPUT_BYTES_MAX = 1 << 20
"""Of each stream of a command's output."""
PIECE_BYTES_MAX = 1 << 14
"""Of a stream's piece."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]

PieceHandler = Callable[[int, bytes], None]
"""Takes a stream's id and the next bytes of it; raises `SandboxError` if it breaks the protocol."""


class FilePiece(msgspec.Struct, array_like=True, frozen=True):
    """A part of a file to write: the first creates or empties it, the next ones append."""

    path: str
    mode: int
    append: bool
    data: bytes


class GuestRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Host -> guest agent (`guest/request.h` has the same fields)."""

    v: int = 0
    id: int = 0
    op: str
    op_key: str = ""
    deadline_ms: int = 0
    bytes_max: int = 0
    offset: int = 0
    target: int = 0
    path: str = ""
    argv: list[str] = []
    env: list[str] = []
    files: list[FilePiece] = []
    peer: list[str] = []
    covers: list[str] = []
    epoch: int = 0
    clock_ns: int = 0
    entropy: bytes = b""
    hostname: bytes = b""
    machine_id: bytes = b""
    data: bytes = b""


class LineState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a quiet line, from which another connection can continue with a copy."""

    sent: int = 0
    """Bytes that the guest has read since it booted."""
    next_id: int = 1
    """Running commands answer to their old ids: new ones must not repeat these."""
    epoch: int = 0
    """Number of the copy; the guest refuses requests for an earlier one."""


class GuestIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What distinguishes a copy from the original machine; empty fields change nothing."""

    epoch: int
    entropy: bytes = b""
    hostname: str = ""
    machine_id: str = ""

    @classmethod
    def new(cls, epoch: int, hostname: str = "vm") -> Self:
        """Return a fresh identity."""
        token = secrets.token_bytes(48)
        return cls(epoch=epoch, entropy=token[:32], hostname=hostname, machine_id=token[32:].hex())


class FileEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One item of a listing; its size and mode follow and are not read."""

    path: bytes
    kind: Literal["file", "dir", "link", "other"]


class GuestReply(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Guest agent -> host; each operation fills its own fields."""

    v: Literal[1]
    id: _Count
    credit: _Count
    hello: int = 0
    error: str = ""
    text: bytes = b""
    """Bytes, since a path in it need not be UTF-8."""
    exit_code: Annotated[int, msgspec.Meta(ge=-255, le=255)] = 0
    duration_ms: _Count = 0
    timed_out: bool = False
    truncated: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    size: _Count = 0
    data: bytes = b""
    written: _Count = 0
    files: list[FileEntry] = []
    epoch: _Count = 0
    """Of the copy that it is from a thaw on."""
    stream: _Count = 0
    """Sent without a request: `data` are the next bytes of this stream; empty means its end."""
