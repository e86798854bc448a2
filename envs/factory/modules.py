"""Modules of the standard library, of installed packages and of folders: read, never imported."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from penstock.envs.tasks.source import Rejection, TaskRejectedError
from penstock.messages.errors import NotFoundError

LIBRARY = "stdlib"
"""Folder that the standard library's modules lie in: their own names would hide the machine's."""
MODULE_BYTES_MAX = 160 << 10
_SKIPPED = frozenset(
    {"test", "tests", "testing", "idlelib", "lib2to3", "site-packages", "__pycache__", "turtledemo",
     "ensurepip", "distutils", "encodings", "pydoc_data", "_vendor", "vendor"}
)  # fmt: skip


@dataclass(frozen=True)
class Module:
    """One module of a root folder."""

    root: Path
    path: PurePosixPath
    """Below the root, e.g. `networkx/utils/misc.py`."""
    prefix: str = ""
    """Folder that the agent sees the root as."""

    @property
    def repository(self) -> str:
        """The top-level package or module it belongs to."""
        top = self.path.parts[0].removesuffix(".py")
        return f"{self.prefix}/{top}" if self.prefix else top

    @property
    def name(self) -> str:
        """Dotted, as the agent's repository has it."""
        parts = [*([self.prefix] if self.prefix else []), *self.path.with_suffix("").parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def file(self) -> str:
        """Where it lies in the agent's repository."""
        return str(PurePosixPath(self.prefix) / self.path)

    def read(self) -> str:
        """Return its source.

        Raises:
            TaskRejectedError: It is too large or no UTF-8.

        """
        data = (self.root / self.path).read_bytes()
        if len(data) > MODULE_BYTES_MAX:
            raise TaskRejectedError(Rejection.TOO_LARGE, f"{self.file}: {len(data)} bytes")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise TaskRejectedError(Rejection.NOT_PARSED, f"{self.file}: {error}") from error


def library_modules() -> list[Module]:
    """Return the standard library's modules, without its tests, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [Module(root, path, LIBRARY) for path in _python_files(root, root)]


def package_modules(name: str) -> list[Module]:
    """Return the modules of one installed package, sorted.

    Raises:
        NotFoundError: No package or module of that import name is installed.

    """
    root = Path(sysconfig.get_paths()["purelib"])
    if not name.isidentifier():
        raise NotFoundError(f"package {name!r}: expected an import name, e.g. networkx")
    if (root / name).is_dir():
        return [Module(root, path) for path in _python_files(root, root / name)]
    if (root / f"{name}.py").is_file():
        return [Module(root, PurePosixPath(f"{name}.py"))]
    raise NotFoundError(f"package {name!r} is not installed in {root}")


def folder_modules(folder: Path) -> list[Module]:
    """Return the modules below a folder: a repository's checkout or its `src`."""
    root = folder / "src" if (folder / "src").is_dir() else folder
    if not root.is_dir():
        raise NotFoundError(f"{folder}: expected a folder")
    return [Module(root, path) for path in _python_files(root, root)]


def _python_files(root: Path, folder: Path) -> list[PurePosixPath]:
    paths = [PurePosixPath(path.relative_to(root)) for path in folder.rglob("*.py")]
    return sorted(path for path in paths if not _SKIPPED & set(path.parts) and _is_plain(path))


def _is_plain(path: PurePosixPath) -> bool:
    return all(part.removesuffix(".py").isidentifier() for part in path.parts)
