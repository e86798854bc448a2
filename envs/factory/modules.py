"""Modules of a repository, and the files that one needs: the small repository that an agent gets.

Imports are followed below the module's root, transitively. Those for a type checker never run and
are not followed. Where all of it would be too much, what functions import only when they are called
is left out, and then what the packages around the module would load; whether the rest works so is
found out in a machine.
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
"""Folder that the standard library's modules lie in: their own names would hide the machine's."""
MODULE_BYTES_MAX = 160 << 10
_SKIPPED = frozenset(
    {"test", "tests", "testing", "idlelib", "lib2to3", "site-packages", "__pycache__", "turtledemo",
     "ensurepip", "distutils", "encodings", "pydoc_data", "_vendor", "vendor"}
)  # fmt: skip
_FROZEN = frozenset(
    {"_collections_abc", "_sitebuiltins", "abc", "codecs", "genericpath", "importlib", "io",
     "ntpath", "os", "posixpath", "runpy", "site", "stat", "zipimport"}
)  # fmt: skip
"""Modules that the interpreter's program holds, from Python 3.11 on."""


@dataclass(frozen=True)
class Module:
    """One module of a root folder."""

    root: Path
    path: PurePosixPath
    """Path below the root, e.g. `networkx/utils/misc.py`."""
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
        """Path in the agent's repository."""
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
    paths = [path for path in _python_files(root, root) if not _is_elsewhere(path)]
    return [Module(root, path, LIBRARY) for path in paths]


def _is_elsewhere(path: PurePosixPath) -> bool:
    """Return whether the machine has a module's right answers in a place that no file covers.

    The interpreter itself holds some modules; `_pydecimal` and its kind are others in Python.
    """
    top = path.parts[0].removesuffix(".py")
    return top in _FROZEN or top.startswith("_py")


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


FILES_MAX = 64
FILES_BYTES_MAX = 400 << 10
_Import = ast.Import | ast.ImportFrom
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def needed_files(module: Module) -> dict[str, str]:
    """Return the module with all that it imports from its root, by path in the repository.

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
    marks = {str(folder / "__init__.py"): "" for folder in folders if folder.name}
    return marks | files


@lru_cache(maxsize=4096)
def _loaded(module: Module) -> tuple[tuple[PurePosixPath, bool], ...]:
    """Return the files that a module loads, its parents' first; whether a call alone loads them."""
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
    """Yield the import statements that can run, and whether only in a function."""
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
