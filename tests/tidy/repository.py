"""The repository as the tidy rules read it: files found once, parsed once."""

import ast
import os
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("messages", "actors", "envs", "kernels", "gateway", "infra")
SOURCE_SUFFIXES = (".py", ".c", ".h", ".cu", ".cuh")
SKIPPED = {"__pycache__", "build", "dist", "runs"}


@lru_cache(maxsize=4096)
def _text(path: Path, _mtime_ns: int) -> str:
    return path.read_text(encoding="utf-8")


@lru_cache(maxsize=4096)
def _parsed(path: Path, mtime_ns: int) -> ast.Module:
    return ast.parse(_text(path, mtime_ns), str(path))


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

    def text(self, path: str) -> str:
        """Return the content of a file."""
        full = self.root / path
        return _text(full, full.stat().st_mtime_ns)

    def tree(self, path: str) -> ast.Module:
        """Return the syntax tree of a Python file."""
        full = self.root / path
        return _parsed(full, full.stat().st_mtime_ns)

    def docstrings(self, path: str) -> Iterator[tuple[int, str]]:
        """Yield every string that stands alone as a statement, with its first line."""
        for node in ast.walk(self.tree(path)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                value = node.value.value
                if isinstance(value, str):
                    yield node.lineno, value
