"""Rules on size and place: functions, files, folders, packages, class names."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.tidy.repository import PRODUCT, SOURCE_SUFFIXES, Repository

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = {"product": 600, "tests": 600}
FLAT_FILES_MAX = 20

# Folders that take parts: their docstring says how to add one.
PARTS = (
    "actors",
    "actors/judge",
    "actors/trainer/objective",
    "envs/harness",
    "envs/microvm",
    "infra/bus",
    "infra/commands",
    "infra/stores",
    "kernels/ops",
    "messages",
)

DECODERS = (
    "messages/reading/parsing.py",
    "messages/codec.py",
    # Unpickles what ranks exchange, once their shared secret has authenticated it.
    "actors/trainer/ranks/world.py",
)
RAW_DECODERS = {
    *("msgspec.json.decode", "msgspec.msgpack.decode", "tomllib.load", "tomllib.loads"),
    *("pickle.load", "pickle.loads", "marshal.loads", "torch.load", "yaml.load"),
}

SILENCED = re.compile(
    r"#\s*(?:pyright:\s*(?!ignore\b)\w|(?:ruff|flake8):\s*(?:noqa|disable)|fmt:\s*off)"
)
ALONE = re.compile(r"#\s*(?:type|pyright):\s*ignore\b")

SHARED_BY_ACTORS = {"actors/runtime", "actors/policy"}


def long_functions(repository: Repository) -> Iterator[str]:
    """A function, signature and docstring included, fits on a screen or two."""
    for path in repository.python(*PRODUCT, "examples", "tests"):
        for node in repository.nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    yield f"{path}:{node.lineno}: {node.name} has {lines} lines"


def long_files(repository: Repository) -> Iterator[str]:
    """A file holds one idea."""
    for path in repository.files:
        top = path.split("/")[0]
        if top not in {*PRODUCT, "examples", "tests"} or not path.endswith(
            (*SOURCE_SUFFIXES, ".js", ".sh")
        ):
            continue
        bound = FILE_LINES_MAX["tests" if top == "tests" else "product"]
        lines = len(repository.text(path).splitlines())
        if lines > bound:
            yield f"{path}: {lines} lines, at most {bound}"


def _source_folders(repository: Repository, *tops: str) -> dict[str, list[str]]:
    folders: dict[str, list[str]] = defaultdict(list)
    for path in repository.files:
        if path.split("/")[0] in tops and path.endswith(SOURCE_SUFFIXES):
            folder, _, name = path.rpartition("/")
            folders[folder].append(name)
    return folders


def crowded_folders(repository: Repository) -> Iterator[str]:
    """A folder can be read at a glance."""
    for folder, names in _source_folders(repository, *PRODUCT, "examples", "tests").items():
        flat = [name for name in names if name != "__init__.py"]
        if len(flat) > FLAT_FILES_MAX:
            yield f"{folder}: {len(flat)} flat files, at most {FLAT_FILES_MAX}"


def lonely_modules(repository: Repository) -> Iterator[str]:
    """A package that holds one module and no other folder is no folder."""
    folders = _source_folders(repository, *PRODUCT)
    for folder, names in folders.items():
        flat = [name for name in names if name != "__init__.py"]
        if "__init__.py" not in names:
            continue
        has_folders = any(other.startswith(f"{folder}/") for other in folders)
        if len(flat) == 1 and not has_folders:
            yield f"{folder}: holds only {flat[0]}"


def undescribed_packages(repository: Repository) -> Iterator[str]:
    """A package says what it is for; one that takes parts says how to add one."""
    for folder, names in _source_folders(repository, *PRODUCT).items():
        if not any(name.endswith(".py") for name in names):
            continue
        path = f"{folder}/__init__.py"
        if "__init__.py" not in names:
            yield f"{folder}: no __init__.py"
            continue
        said = ast.get_docstring(repository.tree(path)) or ""
        if not said:
            yield f"{path}: does not say what the folder is for"
        elif folder in PARTS and "add" not in said.lower():
            yield f"{path}: does not say how to add a part"


def colliding_classes(repository: Repository) -> Iterator[str]:
    """A public class name means one thing in the whole product."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in repository.python():
        for node in repository.tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    for name, paths in sorted(places.items()):
        if len(paths) > 1:
            yield f"{name}: {', '.join(paths)}"


def raw_decoding(repository: Repository) -> Iterator[str]:
    """Bytes become values in `messages/reading/parsing.py` alone, which bounds and types faults."""
    for path in repository.python(*PRODUCT):
        if path in DECODERS:
            continue
        for node in repository.nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in RAW_DECODERS:
                yield f"{path}:{node.lineno}: {ast.unparse(node.func)}"


def silenced_files(repository: Repository) -> Iterator[str]:
    """No comment takes a whole file out of a check (ruff's PGH: nor a line out of all checks)."""
    for path in repository.python(*PRODUCT, "examples", "tests"):
        lines = repository.text(path).splitlines()
        for number, comment in repository.comments(path):
            stands_alone = lines[number - 1].lstrip().startswith("#")
            if SILENCED.search(comment) or (stands_alone and ALONE.search(comment)):
                yield f"{path}:{number}: {comment}"
        for node in repository.nodes(path):
            names = {getattr(node, key, "") for key in ("id", "attr", "name")}
            if isinstance(node, ast.expr | ast.alias) and "no_type_check" in names:
                yield f"{path}:{node.lineno}: no_type_check"


def unlisted_actors(repository: Repository) -> Iterator[str]:
    """Each role stands in the contract that keeps roles apart (`pyproject.toml`)."""
    contracts = repository.text("pyproject.toml")
    for folder in _source_folders(repository, "actors"):
        if folder.count("/") == 1 and folder not in SHARED_BY_ACTORS:
            module = f'"penstock.{folder.replace("/", ".")}"'
            if module not in contracts:
                yield f"{folder}: {module} is in no import contract"


def module_of(path: str) -> str:
    """Return the dotted name of a product file, without the root package.

    Example:
        `actors/pacer/__init__.py` is `actors.pacer`.
    """
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
