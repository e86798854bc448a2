"""A file tree in memory: the content of a container image's layers, and how they stack. Pure.

A layer is the `Node` of its root. A removed file is a whiteout, as in overlayfs: a character device
0:0. A folder that replaces a lower one is `opaque` until `settle` replaces that by whiteouts, since
machines' file systems have no extended attributes.
"""

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.messages.errors import PenstockError

FILES_MAX = 500_000
DEPTH_MAX = 100
NAME_BYTES_MAX = 255
LINK_BYTES_MAX = 3_900
"""Of a symbolic link's target, which lies in one block beside its inode."""
LINKS_FOLLOWED_MAX = 40
FOLDER, WHITEOUT = stat.S_IFDIR | 0o755, stat.S_IFCHR


class ImageError(PenstockError, ValueError):
    """An image, an archive or a registry's answer is damaged or hostile, or exceeds a bound."""


@dataclass(slots=True, eq=False)
class Node:
    """A file, folder, link or whiteout; a hard link is the same node under two names."""

    mode: int = FOLDER
    uid: int = 0
    gid: int = 0
    size: int = 0
    data: bytes = b""
    """Content of a link, and of a small file."""
    block: int = 0
    """First block of a larger file's content, in its layer's file."""
    source: int = -1
    """Layer that holds the content, where layers are merged; -1: the file that is written."""
    opaque: bool = False
    children: dict[bytes, "Node"] = field(default_factory=dict)
    nid: int = -1

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link."""
        return stat.S_ISLNK(self.mode)

    @property
    def is_whiteout(self) -> bool:
        """Whether it represents a removed file."""
        return stat.S_ISCHR(self.mode)


def parts_of(path: bytes) -> list[bytes]:
    """Return the names in a path of an archive.

    Raises:
        ImageError: It leaves the root, is too deep, or has a name that is too long.

    """
    parts = [part for part in path.split(b"/") if part not in {b"", b"."}]
    if b".." in parts or b"\0" in path:
        raise ImageError(f"path {path[:200]!r}: expected one inside the image")
    if len(parts) > DEPTH_MAX or any(len(part) > NAME_BYTES_MAX for part in parts):
        raise ImageError(
            f"path {path[:200]!r}: expected at most {DEPTH_MAX} names of {NAME_BYTES_MAX} bytes"
        )
    return parts


def walk(root: Node) -> Iterator[tuple[bytes, Node]]:
    """Yield every path and node below a root, each folder before its content."""
    stack = [(b"", root)]
    while stack:
        at, node = stack.pop()
        for name, child in node.children.items():
            path = at + b"/" + name
            yield path, child
            if child.is_folder:
                stack.append((path, child))


def settle(root: Node, lowers: Sequence[Node]) -> None:
    """Replace opaque folders by whiteouts of the lower files that they hide.

    Args:
        root: The layer's root, changed in place.
        lowers: Roots of the layers below it, the uppermost first.

    """
    stack = [(root, list(lowers))]
    while stack:
        node, below = stack.pop()
        names = {name for lower in below for name in lower.children} if node.opaque else set()
        for name in names - set(node.children):
            if _below(below, name):
                node.children[name] = Node(WHITEOUT)
        for name, child in node.children.items():
            found = _below(below, name)
            if child.is_folder and found:
                child.opaque = child.opaque or node.opaque
                stack.append((child, found))
        node.opaque = False


def _below(lowers: Sequence[Node], name: bytes) -> list[Node]:
    """Return what lower layers have under a name: one file, or folders that merge."""
    found: list[Node] = []
    for lower in lowers:
        child = lower.children.get(name)
        if child is None:
            continue
        if child.is_folder:
            found.append(child)
            continue
        if not found and not child.is_whiteout:
            found.append(child)
        break
    return found


def merge(layers: Sequence[Node]) -> Node:
    """Merge settled layers, uppermost first, into one.

    Whiteouts stay, since there may be layers below.
    """
    merged = Node(layers[0].mode, layers[0].uid, layers[0].gid)
    stack = [(merged, list(layers))]
    while stack:
        node, parts = stack.pop()
        for name in {name for part in parts for name in part.children}:
            tops = [part.children[name] for part in parts if name in part.children]
            first = tops[0]
            if not first.is_folder:
                node.children[name] = first
                continue
            folders = [one for one in tops[: _until_other(tops)]]
            child = Node(first.mode, first.uid, first.gid)
            # A file or a whiteout between folders hides the folders below it, including other
            # layers'.
            child.opaque = len(folders) < len(tops)
            node.children[name] = child
            stack.append((child, folders))
    return merged


def _until_other(nodes: Sequence[Node]) -> int:
    return next((i for i, node in enumerate(nodes) if not node.is_folder), len(nodes))


def find(layers: Sequence[Node], path: bytes) -> tuple[bytes, Node] | None:
    """Return the real path and node of a path in a stack of layers, uppermost first, or None.

    Links are followed inside the image. None if there is nothing, or if links form a cycle.
    """
    todo, done, here = parts_lenient(path), [], list(layers)
    stack: list[list[Node]] = [here]
    num_followed = 0
    while todo:
        name = todo.pop(0)
        if name == b"..":
            done, stack = done[:-1], stack[:-1] or stack
            continue
        found = _below(stack[-1], name)
        if not found:
            return None
        if found[0].is_link:
            num_followed += 1
            if num_followed > LINKS_FOLLOWED_MAX:
                return None
            target = found[0].data
            if target.startswith(b"/"):
                done, stack = [], stack[:1]
            todo = parts_lenient(target) + todo
            continue
        done.append(name)
        stack.append(found)
    return b"/" + b"/".join(done), stack[-1][0]


def parts_lenient(path: bytes) -> list[bytes]:
    """Return the names in a path, including `..`."""
    return [part for part in path.split(b"/") if part not in {b"", b"."}]
