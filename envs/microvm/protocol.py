"""Messages between the host and a guest agent, and their size limits.

A frame is a u32 little-endian length and a msgpack map: a `GuestRequest` or a `GuestReply`.
"""

import secrets
from collections.abc import Callable
from typing import Annotated, Literal, Self

import msgspec

VERSION = 1
WINDOW_BYTES = 3000
"""Maximum unconfirmed bytes; below the 4 KiB that a serial line buffers."""
REQUEST_BYTES_MAX = 1 << 20
REPLY_BYTES_MAX = (2 << 20) + 8192
"""Maximum bytes of any reply: two output streams and the rest of the frame."""
REQUESTS_MAX = 256
OUTPUT_BYTES_MAX = 1 << 20
"""Maximum bytes of each output stream of a command."""
PIECE_BYTES_MAX = 1 << 14
"""Maximum bytes of a piece of a stream."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]

PieceHandler = Callable[[int, bytes], None]
"""Function of a stream id and its next bytes; raises `SandboxError` on a protocol violation."""


class FilePiece(msgspec.Struct, array_like=True, frozen=True):
    """Part of a file to write: the first part creates or truncates the file, later ones append."""

    path: str | bytes
    mode: int
    append: bool
    data: bytes


class GuestRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Request of the host to the guest agent (`guest/request.h` has the same fields)."""

    v: int = 0
    id: int = 0
    op: str
    op_key: str = ""
    deadline_ms: int = 0
    bytes_max: int = 0
    offset: int = 0
    target: int = 0
    path: str | bytes = ""
    argv: list[str | bytes] = []
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
    """State of an idle line, from which a connection to a copy of the machine continues."""

    sent: int = 0
    """Bytes that the guest has read since it booted."""
    next_id: int = 1
    """First unused request id; commands that still run will answer to lower ones."""
    epoch: int = 0
    """Number of the copy; the guest refuses requests for an earlier one."""


class GuestIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Properties that distinguish a copy from the original machine; empty fields change nothing."""

    epoch: int
    entropy: bytes = b""
    hostname: str = ""
    machine_id: str = ""

    @classmethod
    def new(cls, epoch: int, hostname: str = "vm") -> Self:
        """Return an identity with fresh randomness and machine id."""
        token = secrets.token_bytes(48)
        return cls(epoch=epoch, entropy=token[:32], hostname=hostname, machine_id=token[32:].hex())


class FileEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Item of a listing; the size and mode that follow on the wire are ignored."""

    path: bytes
    kind: Literal["file", "dir", "link", "other"]


class GuestReply(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Reply of the guest agent to the host; each operation fills its own fields."""

    v: Literal[1]
    id: _Count
    credit: _Count
    hello: int = 0
    error: str = ""
    text: bytes = b""
    """Error text, as bytes because a path in it need not be UTF-8."""
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
    """Number of the copy that the guest is after a thaw."""
    stream: _Count = 0
    """Id of the stream whose next bytes are in `data`, sent unsolicited; no bytes mean its end."""
