"""Converts a layer's tar stream to an erofs image, in an unprivileged process.

Bytes, files, names, depth, memory and time are bounded, since layers may be hostile.
Devices and sockets
are dropped. Nothing is unpacked into this host's file system. `python -m` runs `main`; `convert`
starts it.
"""

import contextlib
import gzip
import hashlib
import io
import os
import resource
import stat
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
import zstandard

from penstock.envs.microvm.images.assets import find_bubblewrap
from penstock.envs.microvm.oci.erofs import ErofsWriter, read_erofs
from penstock.envs.microvm.oci.tree import (
    FILES_MAX,
    FOLDER,
    LINK_BYTES_MAX,
    WHITEOUT,
    ImageError,
    Node,
    merge,
    parts_of,
    settle,
)
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json

LAYER_BYTES_MAX = 16 << 30
"""Maximum bytes of one layer, unpacked."""
LAYER_S_MAX = 900.0
_MEMORY_BYTES_MAX = 3 << 30
_HEADER_BYTES_MAX = 1 << 20
"""Of an extended header: tarfile reads it whole."""
_REMOVED, _OPAQUE = b".wh.", b".wh..wh..opq"
_OVERLAY_OPAQUE = "SCHILY.xattr.trusted.overlay.opaque"
_EXTENDED = {tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE}
_LONG = {tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK}
_ELF_HEAD_BYTES, _X86_64 = 20, 62
_SHOWN_MAX = 5
_DAMAGED = (tarfile.TarError, zlib.error, zstandard.ZstdError, EOFError, gzip.BadGzipFile,
            struct.error, UnicodeError, OverflowError)  # fmt: skip


class ConvertRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a conversion."""

    blobs: list[str] = []
    """Tar streams, plain, gzip or zstd, lowest first; several become one layer."""
    diff_ids: list[str] = []
    """Hex SHA-256 of each unpacked stream; not compared if empty."""
    merged: list[str] = []
    """Instead of blobs: erofs images to merge, uppermost first."""
    lowers: list[str] = []
    """erofs images of the layers below, the uppermost first."""
    is_overlay: bool = False
    """Whether removed files are devices 0:0, as in the upper folder of an overlay."""
    target: str


class ConvertReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a conversion."""

    error: str = ""
    num_files: int = 0
    num_dropped: int = 0
    """Devices and sockets left out."""
    num_attributes: int = 0
    """Files whose extended attributes were left out."""
    foreign: list[str] = []
    """Some of the programs that are not for x86-64."""


class _CheckedInfo(tarfile.TarInfo):
    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _EXTENDED | _LONG and self.size > _HEADER_BYTES_MAX:
            raise ImageError(f"a header of {self.size} bytes; {_HEADER_BYTES_MAX} at most")
        return super()._proc_member(archive)  # type: ignore[misc]


class _HashStream(io.RawIOBase):
    """Reads a stream and hashes it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.state = hashlib.sha256()
        self._left = LAYER_BYTES_MAX + (FILES_MAX << 10)

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise ImageError(f"a layer has more than {LAYER_BYTES_MAX} bytes")
        self.state.update(data)
        return data


@contextlib.contextmanager
def opened_stream(path: Path) -> Iterator[BinaryIO]:
    """Open a tar stream, decompressing gzip or zstd as detected from its first bytes."""
    with path.open("rb") as file:
        head = file.read(4)
        file.seek(0)
        if head[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=file) as stream:
                yield cast("BinaryIO", stream)
        elif head == b"\x28\xb5\x2f\xfd":
            window = zstandard.ZstdDecompressor(max_window_size=1 << 27)
            with window.stream_reader(file, read_across_frames=True) as stream:
                yield cast("BinaryIO", stream)
        else:
            yield file


class _Layer:
    """A layer's tree, filled from a stream."""

    def __init__(self, writer: ErofsWriter, *, is_overlay: bool) -> None:
        self.root = Node()
        self._writer, self._is_overlay = writer, is_overlay
        self.num_files = self.num_dropped = self.num_attributes = 0
        self.foreign: list[str] = []

    def fill(self, stream: BinaryIO) -> None:
        """Add every member of an archive."""
        with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 20, tarinfo=_CheckedInfo) as tar:
            for member in tar:
                self.num_files += 1
                if self.num_files > FILES_MAX:
                    raise ImageError(f"a layer has more than {FILES_MAX} files")
                self._take(tar, member)
                # Otherwise the archive would keep all headers in memory.
                tar.members = []  # type: ignore[attr-defined]

    def _take(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = parts_of(os.fsencode(member.name))
        if not parts:
            if member.isdir():
                self._own(self.root, member)
            return
        *above, name = parts
        if not self._is_overlay and name.startswith(_REMOVED):
            self._remove(above, name)
            return
        is_removal = self._is_overlay and member.ischr() and not member.devmajor
        node = self._node(member)
        if is_removal:
            node = Node(WHITEOUT)
        if node is None:
            self.num_dropped += 1
            return
        folder = self._folder(above)
        old = folder.children.get(name)
        if old is not None and old.is_folder and node.is_folder:
            self._own(old, member)
            old.opaque = old.opaque or node.opaque
            return
        node.opaque = node.opaque or (old is not None and old.is_whiteout and node.is_folder)
        folder.children[name] = node
        if member.isreg() and node.size:
            content = tar.extractfile(member)
            if content is None:
                raise ImageError(f"{member.name[:200]!r}: no content")
            head = _PeekStream(content)
            self._writer.add(node, cast("BinaryIO", head))
            self._check_program(node, head.head, member.name)

    def _node(self, member: tarfile.TarInfo) -> Node | None:
        """Return a member's node without its content; None if it is dropped."""
        self.num_attributes += any(
            key.startswith("SCHILY.xattr.") and "trusted.overlay." not in key
            for key in member.pax_headers
        )
        if member.islnk():
            found = self._linked(os.fsencode(member.linkname))
            if found is None or found.is_folder:
                raise ImageError(f"{member.name[:200]!r}: a hard link to no file of its layer")
            return found
        node = Node()
        if member.isreg():
            node.mode = stat.S_IFREG
            node.size = member.size
        elif member.issym():
            node.mode, node.data = stat.S_IFLNK, os.fsencode(member.linkname)
            node.size = len(node.data)
            if not 0 < node.size <= LINK_BYTES_MAX or b"\0" in node.data:
                raise ImageError(f"{member.name[:200]!r}: a link of {node.size} bytes")
        elif member.isdir():
            node.mode = stat.S_IFDIR
            opaque = member.pax_headers.get(_OVERLAY_OPAQUE) == "y"
            node.opaque = self._is_overlay and opaque
        else:
            return None
        self._own(node, member)
        return node

    @staticmethod
    def _own(node: Node, member: tarfile.TarInfo) -> None:
        mode = 0o777 if node.is_link else member.mode & 0o7777
        node.mode = stat.S_IFMT(node.mode) | mode
        if not (0 <= member.uid < 1 << 32 and 0 <= member.gid < 1 << 32):
            raise ImageError(f"{member.name[:200]!r}: an owner of more than 32 bits")
        node.uid, node.gid = member.uid, member.gid

    def _folder(self, parts: Sequence[bytes]) -> Node:
        node = self.root
        for name in parts:
            child = node.children.get(name)
            if child is None or child.is_whiteout:
                child = Node(FOLDER, opaque=child is not None)
                node.children[name] = child
            if not child.is_folder:
                raise ImageError(f"path {b'/'.join(parts)[:200]!r}: {name!r} is no folder")
            node = child
        return node

    def _linked(self, path: bytes) -> Node | None:
        node: Node | None = self.root
        for name in parts_of(path):
            node = node.children.get(name) if node else None
        return node

    def _remove(self, above: Sequence[bytes], name: bytes) -> None:
        folder = self._folder(above)
        if name == _OPAQUE:
            folder.opaque = True
            return
        removed = name.removeprefix(_REMOVED)
        if removed in {b"", b".", b".."} or removed.startswith(_REMOVED):
            return  # Markers of other file systems (.wh..wh.plnk), which have no meaning here.
        there = folder.children.get(removed)
        if there is None:
            folder.children[removed] = Node(WHITEOUT)
        elif there.is_folder:
            there.opaque = True

    def _check_program(self, node: Node, head: bytes, name: str) -> None:
        if node.mode & 0o111 and head[:4] == b"\x7fELF" and len(head) == _ELF_HEAD_BYTES:
            machine = int.from_bytes(head[18:20], "little")
            is_ours = head[4] == 2 and machine == _X86_64
            if not is_ours and len(self.foreign) < _SHOWN_MAX:
                self.foreign.append(name[:200])


class _PeekStream:
    """Reads content and keeps its first bytes."""

    def __init__(self, content: object) -> None:
        self._content = cast("BinaryIO", content)
        self.head = b""

    def read(self, size: int) -> bytes:
        data = self._content.read(size)
        self.head = self.head or data[:_ELF_HEAD_BYTES]
        return data


def convert_here(request: ConvertRequest, target: BinaryIO) -> ConvertReport:
    """Convert a layer in this process, without its bounds of memory and time; see `convert`."""
    writer = ErofsWriter(target, bytes_max=LAYER_BYTES_MAX)
    lowers = [Path(path) for path in request.lowers]
    if request.merged:
        paths = [Path(path) for path in request.merged]
        root = merge([read_erofs(path, number) for number, path in enumerate(paths)])
        _copy_content(writer, root, paths)
        _settle(root, lowers)
        writer.finish(root)
        return ConvertReport()
    layers: list[_Layer] = []
    for number, blob in enumerate(request.blobs):
        layer = _Layer(writer, is_overlay=request.is_overlay)
        with opened_stream(Path(blob)) as stream:
            hashed = _HashStream(stream)
            layer.fill(cast("BinaryIO", hashed))
            while request.diff_ids and hashed.read(1 << 20):
                pass  # Bytes after the archive are part of the digest.
        if request.diff_ids and hashed.state.hexdigest() != request.diff_ids[number]:
            raise ImageError(f"a layer's content does not match its digest {hashed.state.name}:"
                             f"{request.diff_ids[number]}")  # fmt: skip
        layers.insert(0, layer)
    root = layers[0].root
    for number, layer in enumerate(reversed(layers)):
        _settle(layer.root, lowers, [one.root for one in layers[len(layers) - number :]])
    if len(layers) > 1:
        root = merge([layer.root for layer in layers])
        _settle(root, lowers)
    writer.finish(root)
    return ConvertReport(
        num_files=sum(layer.num_files for layer in layers),
        num_dropped=sum(layer.num_dropped for layer in layers),
        num_attributes=sum(layer.num_attributes for layer in layers),
        foreign=[name for layer in layers for name in layer.foreign][:_SHOWN_MAX],
    )


def _settle(root: Node, lowers: Sequence[Path], between: Sequence[Node] = ()) -> None:
    # Read lower layers only if needed: few layers have a folder that replaces another.
    if _is_any_opaque(root):
        settle(root, [*between, *map(read_erofs, lowers)])


def _is_any_opaque(root: Node) -> bool:
    todo = [root]
    while todo:
        node = todo.pop()
        if node.opaque:
            return True
        todo += [child for child in node.children.values() if child.is_folder]
    return False


def _copy_content(writer: ErofsWriter, root: Node, paths: Sequence[Path]) -> None:
    with contextlib.ExitStack() as until:
        files = [until.enter_context(path.open("rb")) for path in paths]
        todo, seen = [root], set[int]()
        while todo:
            node = todo.pop()
            if node.block and id(node) not in seen:
                seen.add(id(node))
                file = files[node.source]
                file.seek(node.block << 12)
                writer.add(node, file)
            todo += node.children.values()


def convert(request: ConvertRequest) -> ConvertReport:
    """Convert a layer in a separate process.

    Raises:
        ImageError: The layer is damaged or hostile, or exceeds a bound.

    """
    # The target is opened here: the process sees this host read-only, has no network and no
    # capability, and ends with this one.
    confined = [find_bubblewrap(), "--unshare-all", "--die-with-parent", "--new-session"]
    confined += ["--cap-drop", "ALL", "--ro-bind", "/", "/", "--proc", "/proc", "--"]
    with open(request.target, "wb+") as target:  # noqa: PTH123 - a descriptor is handed on
        try:
            done = subprocess.run(
                [*confined, sys.executable, "-m", __name__, str(target.fileno())],
                input=msgspec.json.encode(request),
                capture_output=True,
                timeout=LAYER_S_MAX,
                pass_fds=[target.fileno()],
                env={"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ImageError(f"a layer takes more than {LAYER_S_MAX:g} s") from None
    try:
        found = parse_json(done.stdout, ConvertReport, "report")
    except CodecError:
        words = done.stderr.decode(errors="replace").strip()[-400:]
        raise ImageError(f"a layer exceeds the bounds of its process ({words})") from None
    if found.error:
        raise ImageError(found.error)
    return found


def main() -> None:
    """Read a request from standard input and write the report to standard output."""
    request = parse_json(sys.stdin.buffer.read(), ConvertRequest, "request")
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES_MAX, _MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CPU, (int(LAYER_S_MAX), int(LAYER_S_MAX)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.ExitStack() as until:
        try:
            target = until.enter_context(os.fdopen(int(sys.argv[1]), "rb+"))
            found = convert_here(request, cast("BinaryIO", target))
        except ImageError as error:
            found = ConvertReport(error=str(error))
        except _DAMAGED as error:
            found = ConvertReport(error=f"a layer is damaged: {error}")
        except MemoryError:
            found = ConvertReport(error=f"a layer needs more than {_MEMORY_BYTES_MAX >> 20} MiB")
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
