"""The repository as the tidy rules read it: files found once, parsed once."""

import ast
import os
import tokenize
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("messages", "actors", "envs", "kernels", "gateway", "infra")
SOURCE_SUFFIXES = (".py", ".c", ".h", ".cu", ".cuh")
SKIPPED = {"__pycache__", "build", "dist", "runs"}


class _File:
    """One file's content, parsed when somebody asks for it."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        self._name = str(path)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self._name)

    @cached_property
    def docstrings(self) -> list[tuple[int, str]]:
        return [
            (node.lineno, node.value.value)
            for node in self.nodes
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ]

    @cached_property
    def comments(self) -> list[tuple[int, str]]:
        lines = iter(self.text.splitlines(keepends=True))
        return [
            (token.start[0], token.string)
            for token in tokenize.generate_tokens(lambda: next(lines, ""))
            if token.type == tokenize.COMMENT
        ]

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))


# By inode and time of change: a scratch copy made of hard links is not parsed again.
_FILES: dict[tuple[int, int, int], _File] = {}


class Repository:
    """All files under a root, hidden folders and build outputs left out.

    It reads the file system and not git, so that a scratch copy or an unpacked revision will do.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root

    @cached_property
    def files(self) -> list[str]:
        """Paths relative to the root, with forward slashes, sorted."""
        found: list[str] = []
        for folder, names, files in os.walk(self.root):
            names[:] = [
                name
                for name in names
                if not name.startswith(".")
                and name not in SKIPPED
                and not name.endswith(".egg-info")
            ]
            found += [Path(folder, name).relative_to(self.root).as_posix() for name in files]
        return sorted(found)

    def python(self, *tops: str) -> list[str]:
        """Python files under the given top folders; without any, of the product."""
        tops = tops or PRODUCT
        return [path for path in self.files if path.endswith(".py") and path.split("/")[0] in tops]

    def _file(self, path: str) -> _File:
        full = self.root / path
        status = full.stat()
        key = (status.st_dev, status.st_ino, status.st_mtime_ns)
        if key not in _FILES:
            _FILES[key] = _File(full)
        return _FILES[key]

    def text(self, path: str) -> str:
        """Return the content of a file."""
        return self._file(path).text

    def tree(self, path: str) -> ast.Module:
        """Return the syntax tree of a Python file."""
        return self._file(path).tree

    def nodes(self, path: str) -> tuple[ast.AST, ...]:
        """Return every node of a Python file."""
        return self._file(path).nodes

    def docstrings(self, path: str) -> list[tuple[int, str]]:
        """Return every string that stands alone as a statement, with its first line."""
        return self._file(path).docstrings

    def comments(self, path: str) -> list[tuple[int, str]]:
        """Return every comment of a Python file, with its line."""
        return self._file(path).comments
