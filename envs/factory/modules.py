"""Modules of a repository, and the files that a module needs: the repository that an agent gets.

Imports below the module's root are followed transitively, except for those under `TYPE_CHECKING`.
If that is too much, imports inside functions are left out, and then those of the packages around
the module. A machine finds out whether the rest still works.
"""

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

from penstock.envs.python_source import PythonSourceError, parse_python
from penstock.envs.tasks.source import Rejection, TaskRejectedError
from penstock.messages.errors import NotFoundError

LIBRARY = "stdlib"
"""Folder for modules of the standard library, whose plain names would shadow the machine's."""
MODULE_BYTES_MAX = 160 << 10
_SKIPPED = frozenset(
    {"test", "tests", "testing", "idlelib", "lib2to3", "site-packages", "__pycache__", "turtledemo",
     "ensurepip", "distutils", "encodings", "pydoc_data", "_vendor", "vendor"}
)  # fmt: skip
_FROZEN = frozenset(
    {"_collections_abc", "_sitebuiltins", "abc", "codecs", "genericpath", "importlib", "io",
     "ntpath", "os", "posixpath", "runpy", "site", "stat", "zipimport"}
)  # fmt: skip
"""Modules frozen into the interpreter, from Python 3.11 on."""


@dataclass(frozen=True)
class Module:
    """One module of a root folder."""

    root: Path
    path: PurePosixPath
    """Path below the root, e.g. `networkx/utils/misc.py`."""
    prefix: str = ""
    """Folder of the root in the agent's repository."""

    @property
    def repository(self) -> str:
        """Top-level package or module."""
        top = self.path.parts[0].removesuffix(".py")
        return f"{self.prefix}/{top}" if self.prefix else top

    @property
    def name(self) -> str:
        """Dotted name in the agent's repository."""
        parts = [*([self.prefix] if self.prefix else []), *self.path.with_suffix("").parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def file(self) -> str:
        """Path in the agent's repository."""
        return str(PurePosixPath(self.prefix) / self.path)

    def read(self) -> str:
        """Return the source.

        Raises:
            TaskRejectedError: The source is too large or not UTF-8.

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
    paths = [path for path in _python_files(root, root) if not _has_copy(path)]
    return [Module(root, path, LIBRARY) for path in paths]


def _has_copy(path: PurePosixPath) -> bool:
    # The machine has the right answers under a name that no file shadows: some modules are frozen
    # into the interpreter, and `_pydecimal` and the like are copies in Python.
    top = path.parts[0].removesuffix(".py")
    return top in _FROZEN or top.startswith("_py")


def package_modules(name: str) -> list[Module]:
    """Return the modules of one installed package, sorted.

    Raises:
        NotFoundError: No package or module of that name is installed.

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


FILES_MAX = 64
FILES_BYTES_MAX = 400 << 10
_Import = ast.Import | ast.ImportFrom
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def needed_files(module: Module) -> dict[str, str]:
    """Return the module and everything that it imports from its root, by path.

    Raises:
        TaskRejectedError: The files are too many or too large.

    """
    found = _needed(module)
    if isinstance(found, TaskRejectedError):
        raise found
    return dict(found)


@lru_cache(maxsize=128)
def _needed(module: Module) -> dict[str, str] | TaskRejectedError:
    # Cached, with the error if any, because all functions of a module need the same files.
    # From the most complete repository to the smallest.
    for is_lazy_left_out, cuts_parents in ((False, False), (True, False), (True, True)):
        try:
            return _closure(module, is_lazy_left_out=is_lazy_left_out, cuts_parents=cuts_parents)
        except TaskRejectedError as error:
            rejection = error
            if error.reason is not Rejection.TOO_LARGE:
                break
    return rejection


def _closure(module: Module, *, is_lazy_left_out: bool, cuts_parents: bool) -> dict[str, str]:
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
        if not is_cut:
            waiting += [
                Module(module.root, path, module.prefix)
                for path, is_lazy in _loaded(one)
                if not (is_lazy and is_lazy_left_out)
            ]
    files = {str(PurePosixPath(module.prefix) / path): text for path, text in found.items()}
    folders = {PurePosixPath(path).parent for path in files}
    # Without a file of their own, packages would be namespace packages, which may be shadowed.
    marks = {str(folder / "__init__.py"): "" for folder in folders if folder.name}
    return marks | files


@lru_cache(maxsize=4096)
def _loaded(module: Module) -> tuple[tuple[PurePosixPath, bool], ...]:
    """Return (path, whether only calls load it) of the files that a module loads."""
    try:
        tree = parse_python(module.read())
    except PythonSourceError as error:
        raise TaskRejectedError(Rejection.NOT_PARSED, f"{module.file}: {error}") from error
    parents = [
        path for parent in list(module.path.parents)[:-1] for path in _existing(module, parent)
    ]
    loaded = dict.fromkeys(parents, False)
    for statement, is_lazy in _imports(tree, is_lazy=False):
        for path in _files_of(module, statement):
            loaded[path] = loaded.get(path, True) and is_lazy
    return tuple(loaded.items())


def _imports(node: ast.AST, *, is_lazy: bool) -> Iterator[tuple[_Import, bool]]:
    """Yield (import statement, whether it is inside a function), except for type checking."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        for one in node.orelse:
            yield from _imports(one, is_lazy=is_lazy)
        return
    if isinstance(node, _Import):
        yield node, is_lazy
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, is_lazy=is_lazy or isinstance(node, _FUNCTIONS))


def _files_of(module: Module, statement: _Import) -> Iterator[PurePosixPath]:
    package = module.path.parent.parts
    if isinstance(statement, ast.Import):
        for alias in [] if module.prefix else statement.names:
            yield from _with_parents(module, tuple(alias.name.split(".")))
    elif statement.level or not module.prefix:
        base = package[: len(package) - statement.level + 1] if statement.level else ()
        parts = (*base, *(statement.module or "").split(".")) if statement.module else base
        yield from _with_parents(module, parts)
        for alias in statement.names:
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
