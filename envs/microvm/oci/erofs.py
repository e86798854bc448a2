"""Writes a file tree as an erofs image, and reads images that it wrote.

```
 block 0: superblock │ content of larger files, as it comes │ inodes, root first │ folders
```
No privileges are needed: owners, links and whiteouts are numbers in the file, and no path of the
tree becomes a path of this host. Equal trees give equal bytes. All times are 0, which distinguishes
a layer's files from those that an episode touched.

Source: Linux's documentation of erofs, and its header of the format on disk.
"""

import os
import stat
import struct
from pathlib import Path
from typing import BinaryIO

from penstock.envs.microvm.oci.tree import DEPTH_MAX, FILES_MAX, ImageError, Node

BLOCK = 4096
SMALL_BYTES_MAX = 2_048
"""Content up to this size lies beside its inode."""
_SMALL_BYTES_IN_ALL = 64 << 20
"""Beyond it small files have blocks, too: they are kept in memory."""
_MAGIC, _SUPER_AT, _INODE = 0xE0F5E1E2, 1024, 64
_SUPER = struct.Struct("<IIIBBHQQIIII16s16sIHHH")
_INODE_FIELDS = struct.Struct("<HHHHQIIIIQII16x")
_ENTRY = struct.Struct("<QHBB")
_PLAIN, _INLINE = 1, 5
_TYPES = {stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFCHR: 3, stat.S_IFLNK: 7}
_PIECE = 1 << 20
_ZEROS = bytes(_PIECE)


class ErofsWriter:
    """Writes one image: first the content of files, then `finish` with the tree.

    Args:
        file: Empty file, seekable.
        bytes_max: Maximum bytes of content, holes included.

    """

    def __init__(self, file: BinaryIO, *, bytes_max: int) -> None:
        self._file = file
        self._blocks = 1
        self._left = bytes_max
        self._small = 0

    def add(self, node: Node, content: BinaryIO) -> None:
        """Take a file's `node.size` bytes.

        Raises:
            ImageError: There are fewer bytes, or the total exceeds the bound.

        """
        self._left -= node.size
        if self._left < 0:
            raise ImageError("the layer holds more bytes than an image may")
        if node.size <= SMALL_BYTES_MAX and self._small + node.size <= _SMALL_BYTES_IN_ALL:
            self._small += node.size
            node.data = _exactly(content, node.size)
            return
        node.block = self._blocks
        self._file.seek(self._blocks * BLOCK)
        left = node.size
        while left:
            piece = _exactly(content, min(left, _PIECE))
            # Holes stay holes, so zeros take no space on this host.
            if piece == _ZEROS[: len(piece)]:
                self._file.seek(len(piece), os.SEEK_CUR)
            else:
                self._file.write(piece)
            left -= len(piece)
        self._blocks += -(-node.size // BLOCK)

    def finish(self, root: Node) -> None:
        """Write the inodes and folders of a tree whose files were added."""
        meta, folders = self._blocks, _Folders()
        order = _number(root)
        end = max(node.nid * 32 + _INODE + folders.inline(node) for node in order)
        at = meta + -(-end // BLOCK)
        links: dict[int, int] = {}
        for node in order:
            for child in node.children.values():
                links[id(child)] = links.get(id(child), 0) + 1
        parents = {id(child): node for node in order for child in node.children.values()}
        for node in order:
            if node.is_folder:
                content = folders.encode(node, parents.get(id(node), node))
                num_links = 2 + sum(child.is_folder for child in node.children.values())
            else:
                content, num_links = node.data, links[id(node)]
            is_inline = folders.inline(node) > 0 or not content
            block = node.block
            if node.is_folder and not is_inline:
                block, at = at, at + -(-len(content) // BLOCK)
                self._file.seek(block * BLOCK)
                self._file.write(content)
            size = len(content) if node.is_folder else node.size
            layout = _INLINE if is_inline and content else _PLAIN
            inode = _INODE_FIELDS.pack(
                *(layout, 0, node.mode, 0, size, block if size else 0, node.nid),
                *(node.uid, node.gid, 0, 0, num_links),
            )
            self._file.seek(meta * BLOCK + node.nid * 32)
            self._file.write(inode + (content if layout == _INLINE else b""))
        self._file.truncate(at * BLOCK)
        self._file.seek(_SUPER_AT)
        fields = (_MAGIC, 0, 0, 12, 0, root.nid, len(order), 0, 0, at, meta, 0, bytes(15) + b"\1")
        self._file.write(_SUPER.pack(*fields, bytes(16), 0, 0, 0, 0))
        self._file.flush()


class _Folders:
    """The bytes of folders."""

    @staticmethod
    def size(node: Node) -> int:
        """Return the bytes of a folder's entries, without encoding them."""
        blocks, last = _packed([b".", b"..", *node.children])
        return (len(blocks) - 1) * BLOCK + last

    def inline(self, node: Node) -> int:
        """Return the bytes that are stored next to an inode."""
        if not node.is_folder:
            return len(node.data)
        size = self.size(node)
        return size if size <= SMALL_BYTES_MAX else 0

    @staticmethod
    def encode(node: Node, parent: Node) -> bytes:
        """Return a folder's entries."""
        nodes = {b".": node, b"..": parent, **node.children}
        encoded: list[bytes] = []
        blocks, _ = _packed(list(nodes))
        for names in blocks:
            offset, heads = _ENTRY.size * len(names), bytearray()
            for name in names:
                kind = _TYPES[stat.S_IFMT(nodes[name].mode)]
                heads += _ENTRY.pack(nodes[name].nid, offset, kind, 0)
                offset += len(name)
            block = bytes(heads) + b"".join(names)
            encoded.append(block)
        return b"".join(block.ljust(BLOCK, b"\0") for block in encoded[:-1]) + encoded[-1]


def _packed(names: list[bytes]) -> tuple[list[list[bytes]], int]:
    """Return the names of each block, in order, and the bytes of the last block."""
    blocks: list[list[bytes]] = [[]]
    used = 0
    for name in sorted(names):
        need = _ENTRY.size + len(name)
        if used + need > BLOCK:
            blocks.append([])
            used = 0
        blocks[-1].append(name)
        used += need
    return blocks, used


def _number(root: Node) -> list[Node]:
    """Assign numbers to all nodes, the root first, and return them in that order."""
    # Start at 64: readers of folders take inode number 0 for a removed file.
    folders, order, at = _Folders(), [], _INODE
    todo, seen = [root], {id(root)}
    while todo:
        node = todo.pop()
        need = _INODE + folders.inline(node)
        # An inode and its inline data share a block.
        if at % BLOCK + need > BLOCK:
            at = -(-at // BLOCK) * BLOCK
        node.nid, at = at // 32, at + -(-need // 32) * 32
        order.append(node)
        for name in sorted(node.children, reverse=True):
            child = node.children[name]
            if id(child) not in seen:
                seen.add(id(child))
                todo.append(child)
    return order


def _exactly(content: BinaryIO, size: int) -> bytes:
    data = content.read(size)
    if len(data) != size:
        raise ImageError(f"truncated: {size} bytes of a file expected, got {len(data)}")
    return data


def read_erofs(path: Path, source: int = -1) -> Node:
    """Return the tree of an image that `ErofsWriter` wrote; content stays in the file.

    Args:
        path: The image.
        source: Number that its nodes carry; see `Node.source`.

    Raises:
        ImageError: It is damaged, or was not written by `ErofsWriter`.

    """
    with path.open("rb") as file:
        head = file.read(BLOCK)
        if len(head) < BLOCK:
            raise ImageError(f"{path.name}: expected an erofs image")
        fields = _SUPER.unpack_from(head, _SUPER_AT)
        if fields[0] != _MAGIC or not fields[10]:
            raise ImageError(f"{path.name}: expected an erofs image")
        meta = fields[10] * BLOCK
        file.seek(meta)
        data = file.read()
    try:
        return _Reader(data, meta, source).read(fields[5])
    except (struct.error, IndexError, RecursionError) as error:
        raise ImageError(f"{path.name}: damaged ({error})") from error


class _Reader:
    def __init__(self, data: bytes, meta: int, source: int) -> None:
        self._data, self._meta, self._source = data, meta, source
        self._nodes: dict[int, Node] = {}

    def read(self, nid: int, depth: int = 0) -> Node:
        if nid in self._nodes:
            return self._nodes[nid]
        if depth > DEPTH_MAX + 1 or len(self._nodes) > FILES_MAX:
            raise IndexError("too deep or too many files")
        layout, _, mode, _, size, block, _, uid, gid, *_ = _INODE_FIELDS.unpack_from(
            self._data, nid * 32
        )
        node = Node(mode, uid, gid, size, source=self._source)
        self._nodes[nid] = node
        if layout == _INLINE:
            at = nid * 32 + _INODE
            node.data = self._data[at : at + size]
        elif stat.S_ISREG(mode):
            node.block = block
        if node.is_folder:
            at = block * BLOCK - self._meta
            content = node.data if layout == _INLINE else self._data[at : at + size]
            node.data = b""
            for name, child in self._entries(content):
                if name not in {b".", b".."}:
                    node.children[name] = self.read(child, depth + 1)
        return node

    @staticmethod
    def _entries(content: bytes) -> list[tuple[bytes, int]]:
        found: list[tuple[bytes, int]] = []
        for start in range(0, len(content), BLOCK):
            block = content[start : start + BLOCK]
            count = _ENTRY.unpack_from(block, 0)[1] // _ENTRY.size
            heads = [_ENTRY.unpack_from(block, i * _ENTRY.size) for i in range(count)]
            ends = [*(head[1] for head in heads[1:]), len(block)]
            for (nid, offset, _, _), end in zip(heads, ends, strict=True):
                found.append((block[offset:end].rstrip(b"\0"), nid))
        return found
