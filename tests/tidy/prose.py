"""Rules on what people read: names of files, folders and modules that exist, nothing left open."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.tidy.layout import module_of
from tests.tidy.repository import PRODUCT, Repository

# Read by people: the product, the documents, the tests' prose. `tests/tidy` names bad examples.
C_SUFFIXES = (".c", ".h", ".cu", ".cuh", ".js")
PROSE_SUFFIXES = (".py", ".md", ".toml", *C_SUFFIXES, ".sh", ".html", "Makefile")

OPEN = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")

COMMENT = re.compile(r"(?<!:)//[^\n]*|/\*.*?\*/|<!--.*?-->", re.DOTALL)
HASH_COMMENT = re.compile(r"(?:^|\s)#.*")

FILE_NAME = re.compile(
    r"(?<![\w./<>{}*$~:@\\-])"
    r"((?:[\w.-]+/)*[A-Za-z0-9_-][\w.-]*\.(?:py|md|c|h|cu|cuh|toml|sh|patch))"
    r"(?![\w/*-]|\.\w)"
)

FOLDER_NAME = re.compile(r"`([a-z_]\w*(?:/\w+)*)/`")
MODULE_NAME = re.compile(r"`penstock((?:\.[a-z_0-9]+)+)`")

# Names of files that are not ours, or that only exist inside an example or a machine.
FOREIGN = {
    "run-tests.sh": "terminal-bench's task format",
    "solution.sh": "terminal-bench's task format",
    "task.toml": "Harbor's task format",
    "own.py": "of a project that `penstock init` writes",
    "judged.toml": "a user's own, on docs/rewards.md",
    "my.toml": "a user's own, on docs/lora.md",
    "instruction.md": "Harbor's task format",
    "setup.sh": "Harbor's task format",
    "tests/test.sh": "Harbor's task format",
    "test.sh": "Harbor's task format",
    "solution/solve.sh": "Harbor's task format",
    "config.toml": "in the folder of a run",
    "service.toml": "in the folder of a run that is served",
    "try.sh": "a test writes it",
    "__init__.py": "in each package",
    "actor.py": "in each actor's folder",
    "config.py": "in each actor's folder",
    "actors/judge/any_change.py": "a recipe in CONTRIBUTING.md makes it",
    "envs/harness/tools_v3.py": "a recipe in CONTRIBUTING.md makes it",
    "envs/microvm/bubble.py": "a recipe in CONTRIBUTING.md makes it",
    "actors/step_counter": "a recipe in CONTRIBUTING.md makes it",
    "a.py": "an example",
    "other.py": "an example",
    "networkx/utils/misc.py": "an example",
}


def prose_files(repository: Repository, *more: str) -> list[str]:
    """Return the files whose prose is checked: the product, the documents, `more` top folders."""
    tops = {*PRODUCT, "docs", "examples", *more}
    return [
        path
        for path in repository.files
        if path.endswith(PROSE_SUFFIXES)
        and (path.split("/")[0] in tops or "/" not in path)
        and not path.startswith("tests/tidy/")
    ]


def open_ends(repository: Repository) -> Iterator[str]:
    """What is left to do belongs into an issue."""
    for path in prose_files(repository, "tests"):
        for number, line in enumerate(repository.text(path).splitlines(), 1):
            if OPEN.search(line):
                yield f"{path}:{number}: {line.strip()[:90]}"


def _sentences(repository: Repository, path: str) -> Iterator[tuple[int, str]]:
    """Yield what a file says to people, with its line."""
    if path.endswith(".py"):
        yield from repository.docstrings(path)
        yield from repository.comments(path)
    elif path.endswith((".md", "Makefile")):
        yield 1, repository.text(path)
    else:
        text = repository.text(path)
        pattern = COMMENT if path.endswith((*C_SUFFIXES, ".html")) else HASH_COMMENT
        for match in pattern.finditer(text):
            yield 1 + text.count("\n", 0, match.start()), match[0]


def _exists(repository: Repository, name: str, path: str, tails: dict[str, list[str]]) -> bool:
    folder = path.rpartition("/")[0]
    if (repository.root / name).exists() or (repository.root / folder / name).exists():
        return True
    found = tails.get(name, [])
    if "/" in name or not path.endswith(".py") or not path.startswith(PRODUCT):
        return len(found) == 1
    return any(each.startswith(f"{folder}/") for each in found)


def stale_file_names(repository: Repository) -> Iterator[str]:
    """A file that prose names exists: from the root, beside it, or by a name that is unique.

    Of a module, a bare name is that of a file beside or below it: another folder's is no help.
    """
    tails: dict[str, list[str]] = {}
    for path in repository.files:
        parts = PurePosixPath(path).parts
        for start in range(len(parts)):
            tails.setdefault("/".join(parts[start:]), []).append(path)
    for path in prose_files(repository, "tests"):
        if path == "CHANGELOG.md":
            continue
        for number, text in _sentences(repository, path):
            for match in FILE_NAME.finditer(text):
                name = match[1]
                if name in FOREIGN or _exists(repository, name, path, tails):
                    continue
                line = number + text.count("\n", 0, match.start())
                yield f"{path}:{line}: {name}"


def stale_folder_names(repository: Repository) -> Iterator[str]:
    """A folder that prose names (`name/` in backticks) exists, by its path or the end of it."""
    ends = {
        "/".join(parts[start:])
        for path in repository.files
        for parts in (PurePosixPath(path).parent.parts,)
        for start in range(len(parts))
    }
    for path in prose_files(repository):
        if path == "CHANGELOG.md" or not FOLDER_NAME.search(repository.text(path)):
            continue
        for number, text in _sentences(repository, path):
            for match in FOLDER_NAME.finditer(text):
                name = match[1]
                if name in FOREIGN or any(f"{end}/".startswith(f"{name}/") for end in ends):
                    continue
                line = number + text.count("\n", 0, match.start())
                yield f"{path}:{line}: {name}/"


def stale_module_names(repository: Repository) -> Iterator[str]:
    """A module that prose names (`penstock.a.b` in backticks), or a name in one, exists."""
    paths = {module_of(path): path for path in repository.python()}
    for path in prose_files(repository, "tests"):
        for number, text in _sentences(repository, path):
            for match in MODULE_NAME.finditer(text):
                name = match[1].removeprefix(".")
                parent, _, last = name.rpartition(".")
                if name in paths or (
                    parent in paths and re.search(rf"\b{last}\b", repository.text(paths[parent]))
                ):
                    continue
                line = number + text.count("\n", 0, match.start())
                yield f"{path}:{line}: penstock.{name}"


GLOSSARY = "docs/glossary.md"
_PLACE = re.compile(r"\| `([\w./]+)`((?: `\w+`)*) \|$")


def untrue_glossary(repository: Repository) -> Iterator[str]:
    """Each row of the glossary ends with a file and names that stand in it."""
    for number, line in enumerate(repository.text(GLOSSARY).splitlines(), 1):
        if not line.startswith("|") or line.startswith(("|---", "| term")):
            continue
        place = _PLACE.search(line)
        if not place or place[1] not in repository.files:
            yield f"{GLOSSARY}:{number}: names no file"
            continue
        for name in re.findall(r"\w+", place[2]):
            if not re.search(rf"\b{name}\b", repository.text(place[1])):
                yield f"{GLOSSARY}:{number}: no {name} in {place[1]}"
