"""Modules of the standard library and of installed packages, each with the files it needs.

A module is taken with the modules that it imports, transitively, from the same root: together they
are the small repository that the agent gets. Nothing is imported here, only read.
"""

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

from penstock.envs.tasks.source import Rejection, TaskRejectedError
from penstock.messages.errors import NotFoundError

LIBRARY = "stdlib"
"""Folder that the standard library's modules lie in: their own names would hide the machine's."""
FILES_MAX = 64
FILES_BYTES_MAX = 400 << 10
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


def needed_files(module: Module) -> dict[str, str]:
    """Return the module with all that it imports from its root, by path in the repository.

    Where a package's `__init__.py` would load too much, the packages around the module are left
    empty; whether it still works so is found out in a machine.

    Raises:
        TaskRejectedError: They are too many or too large.

    """
    found = _needed(module)
    if isinstance(found, TaskRejectedError):
        raise found
    return dict(found)


@lru_cache(maxsize=128)
def _needed(module: Module) -> dict[str, str] | TaskRejectedError:
    """Return the files or why there are none: many functions of one module ask."""
    try:
        return _closure(module, cuts_parents=False)
    except TaskRejectedError as error:
        if error.reason is not Rejection.TOO_LARGE:
            return error
    try:
        return _closure(module, cuts_parents=True)
    except TaskRejectedError as error:
        return error


def _closure(module: Module, *, cuts_parents: bool) -> dict[str, str]:
    found: dict[PurePosixPath, str] = {}
    waiting = [module]
    while waiting:
        one = waiting.pop()
        if one.path in found:
            continue
        is_cut = cuts_parents and one.path.name == "__init__.py" and one != module
        found[one.path] = "" if is_cut else one.read()
        if len(found) > FILES_MAX or sum(map(len, found.values())) > FILES_BYTES_MAX:
            raise TaskRejectedError(Rejection.TOO_LARGE, f"what {module.file} imports")
        waiting += [Module(module.root, path, module.prefix) for path in _imported(one, found)]
    files = {str(PurePosixPath(module.prefix) / path): text for path, text in found.items()}
    folders = {PurePosixPath(path).parent for path in files}
    marks = {str(folder / "__init__.py"): "" for folder in folders if folder.name}
    return marks | files


def _imported(module: Module, found: dict[PurePosixPath, str]) -> Iterator[PurePosixPath]:
    """Yield the files of the root that a module's imports load, its parents' among them."""
    try:
        tree = ast.parse(found[module.path])
    except (SyntaxError, ValueError, RecursionError) as error:
        raise TaskRejectedError(Rejection.NOT_PARSED, f"{module.file}: {error}") from error
    for parent in list(module.path.parents)[:-1]:
        yield from _existing(module, parent)
    package = module.path.parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and not module.prefix:
            for alias in node.names:
                yield from _with_parents(module, tuple(alias.name.split(".")))
        elif isinstance(node, ast.ImportFrom) and (node.level or not module.prefix):
            base = package[: len(package) - node.level + 1] if node.level else ()
            parts = (*base, *(node.module or "").split(".")) if node.module else base
            yield from _with_parents(module, parts)
            for alias in node.names:
                yield from _existing(module, PurePosixPath(*parts, alias.name))


def _with_parents(module: Module, parts: tuple[str, ...]) -> Iterator[PurePosixPath]:
    for length in range(1, len(parts) + 1):
        yield from _existing(module, PurePosixPath(*parts[:length]))


def _existing(module: Module, place: PurePosixPath) -> Iterator[PurePosixPath]:
    for path in (
        place / "__init__.py",
        place.with_name(f"{place.name}.py") if place.name else place,
    ):
        if path.name and (module.root / path).is_file():
            yield path


def _python_files(root: Path, folder: Path) -> list[PurePosixPath]:
    paths = [PurePosixPath(path.relative_to(root)) for path in folder.rglob("*.py")]
    return sorted(path for path in paths if not _SKIPPED & set(path.parts) and _is_plain(path))


def _is_plain(path: PurePosixPath) -> bool:
    return all(part.removesuffix(".py").isidentifier() for part in path.parts)
