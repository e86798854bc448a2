"""The build context: the files that a Dockerfile may copy, and the disk that carries them."""

import os
import stat
from pathlib import Path

from penstock.envs.microvm.oci.erofs import ErofsWriter
from penstock.envs.microvm.oci.ignore import IgnoreError, ignored, matching
from penstock.envs.microvm.oci.tree import LINK_BYTES_MAX, ImageError, Node, parts_of

FILES_MAX, BYTES_MAX = 100_000, 8 << 30
IGNORE_BYTES_MAX = 1 << 20


class BuildContext:
    """The files next to a Dockerfile.

    Args:
        folder: The folder.
        dockerfile: Path of the Dockerfile in it; its own ignore file takes precedence over the
        folder's.

    Raises:
        ImageError: It has too many files, or its ignore file is out of bounds.

    """

    def __init__(self, folder: Path, dockerfile: str) -> None:
        self._folder = folder
        names = (f"{dockerfile}.dockerignore", ".dockerignore")
        found = next((folder / name for name in names if (folder / name).is_file()), None)
        text = found.read_bytes()[: IGNORE_BYTES_MAX + 1] if found else b""
        if len(text) > IGNORE_BYTES_MAX:
            raise ImageError(f"{found}: expected {IGNORE_BYTES_MAX} bytes at most")
        try:
            is_ignored = ignored(text.decode("utf-8", "surrogateescape"))
        except IgnoreError as error:
            raise ImageError(f"{found}: {error}") from error
        self._paths: dict[str, os.stat_result] = {}
        for at, folders, files in os.walk(folder):
            below = Path(at).relative_to(folder)
            links = [one for one in folders if Path(at, one).is_symlink()]
            folders[:] = sorted(set(folders) - set(links))
            for name in (*files, *links, *folders):
                path = str(below / name)
                if not is_ignored(path):
                    self._add(path)
        if sum(info.st_size for info in self._paths.values()) > BYTES_MAX:
            raise ImageError(f"{folder}: more than {BYTES_MAX} bytes")

    def _add(self, path: str) -> None:
        parents = [str(one) for one in Path(path).parents if str(one) != "."]
        for one in (path, *parents):
            if one not in self._paths:
                self._paths[one] = (self._folder / one).lstat()
        if len(self._paths) > FILES_MAX:
            raise ImageError(f"{self._folder}: more than {FILES_MAX} files")

    def select(self, sources: list[str]) -> tuple[list[str], set[str]]:
        """Return the sources with wildcards expanded, and all paths below them.

        Raises:
            ImageError: A source may not be copied.

        """
        named: list[str] = []
        for source in sources:
            plain = os.path.normpath("/" + source).lstrip("/")
            if any(c in source for c in "*?["):
                found = matching(plain, self._paths)
            else:
                found = [plain or "."] if not plain or plain in self._paths else []
            if not found:
                raise ImageError(f"no file of the folder that may be copied is {source!r}")
            named += found
        below = tuple(f"{one}/" for one in named)
        brought = set(self._paths) if "." in named else {
            path for path in self._paths if path in named or path.startswith(below)
        }  # fmt: skip
        return named, brought

    def write(self, paths: set[str], target: Path) -> None:
        """Write some of the files as a disk.

        Raises:
            ImageError: A file cannot be copied, or changes meanwhile.

        """
        root = Node()
        with target.open("wb+") as out:
            writer = ErofsWriter(out, bytes_max=BYTES_MAX)
            for path in sorted(paths):
                info = self._paths[path]
                node = Node(stat.S_IFMT(info.st_mode) | stat.S_IMODE(info.st_mode))
                if node.is_link:
                    node.data = os.fsencode((self._folder / path).readlink())
                    node.size = len(node.data)
                    if node.size > LINK_BYTES_MAX:
                        raise ImageError(f"{path!r}: a link of {node.size} bytes")
                elif stat.S_ISREG(info.st_mode):
                    node.size = info.st_size
                    # Do not follow a name that became a link meanwhile.
                    fd = os.open(self._folder / path, os.O_RDONLY | os.O_NOFOLLOW)
                    with os.fdopen(fd, "rb") as file:
                        writer.add(node, file)
                elif not node.is_folder:
                    raise ImageError(f"{path!r}: expected a file, a folder or a link")
                *above, name = parts_of(os.fsencode(path))
                folder = root
                for part in above:
                    folder = folder.children.setdefault(part, Node())
                node.children = folder.children[name].children if name in folder.children else {}
                folder.children[name] = node
            writer.finish(root)
