"""The house in figures, before and after: `python -m tests.tidy.bars [REVISION]`.

Without a revision it shows the working tree; with one also that revision, unpacked into a scratch
folder and measured by the same rules. Types are checked by the settings that each tree has.
"""

import ast
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from tests.tidy import cycles, layout, prose, rooms, words
from tests.tidy.repository import PRODUCT, ROOT, SOURCE_SUFFIXES, Repository
from tests.tidy.types import type_faults
from tests.tidy.unreachable import unreachable_names

C_SUFFIXES = (".c", ".h", ".cu", ".cuh")
LOG_CALL = re.compile(r"\b_?log\.(?:debug|info|warning|error|exception|critical)\(")
C_COMMENT = re.compile(r"/\*.*?\*/|^\s*//.*?$", re.DOTALL | re.MULTILINE)


def num_statements(repository: Repository) -> int:
    """Count the statements of the product's Python; docstrings do not count."""
    return sum(
        sum(isinstance(node, ast.stmt) for node in repository.nodes(path))
        - len(repository.docstrings(path))
        for path in repository.python()
    )


def num_c_lines(repository: Repository) -> int:
    """Count the lines of the product's C and CUDA; comments and empty lines do not count."""
    return sum(
        bool(line.strip())
        for path in repository.files
        if path.split("/")[0] in PRODUCT and path.endswith(C_SUFFIXES)
        for line in C_COMMENT.sub("", repository.text(path)).splitlines()
    )


WORDS = {
    "concurrent files without reasons": words.unexplained,
    "field docstrings that begin with Of": words.vague,
    "types without a noun": words.nounless,
}
SHIPPED = (*SOURCE_SUFFIXES, ".js", ".css", ".html", ".sh")
WALK = re.compile(r"^\*\*(.+?)\*\*.*\n\n\|[^\n]*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)


def num_shipped_lines(repository: Repository, *tops: str) -> int:
    """Count the lines of source under the given top folders; without any, of the product."""
    return sum(
        repository.text(path).count("\n")
        for path in repository.files
        if path.split("/")[0] in (tops or PRODUCT) and path.endswith(SHIPPED)
    )


def walks(repository: Repository) -> str:
    """Return how many files each walk of ARCHITECTURE.md goes through, in its order."""
    found = WALK.findall(repository.text("ARCHITECTURE.md"))
    return ", ".join(str(rows.count("\n")) for _, rows in found)


def measure(root: Path) -> dict[str, str]:
    """Return each figure as text."""
    repository = Repository(root)
    paths = repository.python()
    functions = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in paths
        for node in repository.nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    files = [repository.text(path).count("\n") for path in paths]
    statements, c_lines = num_statements(repository), num_c_lines(repository)
    collisions = list(layout.colliding_classes(repository))
    lines = sum(files)
    num_reasons = sum(len(words.reasons(repository, path)) for path in paths)
    log_calls = sum(len(LOG_CALL.findall(repository.text(path))) for path in paths)
    arrows = rooms.num_arrows_up(rooms.room_edges(repository, "infra"))
    faults, num_files = type_faults(root)
    num_errors = sum(not fault.startswith("only ") for fault in faults)
    return {
        "shipped lines of source": f"{num_shipped_lines(repository)}",
        "Python modules": f"{len(paths)}",
        "statements + C lines": f"{statements} + {c_lines} = {statements + c_lines}",
        "function lines: median, max": f"{median(functions):g}, {max(functions)}",
        "file lines: median, max": f"{median(files):g}, {max(files)}",
        "infra: lines, rooms, arrows back up": f"{num_shipped_lines(repository, 'infra')}, "
        f"{len(rooms.rooms(repository, 'infra'))}, {arrows}",
        "files of each walk": walks(repository),
        "comments, one per so many lines": f"{num_reasons}, {lines / max(num_reasons, 1):.0f}",
        "log calls": f"{log_calls}",
        **{name: f"{len(list(rule(repository)))}" for name, rule in WORDS.items()},
        "folders of more than 20 files": f"{len(list(layout.crowded_folders(repository)))}",
        "public class names with two meanings": f"{len(collisions)}",
        "import cycles": f"{len(list(cycles.import_cycles(repository)))}",
        "unreachable names": f"{len(list(unreachable_names(repository)))}",
        "files named that do not exist": f"{len(list(prose.stale_file_names(repository)))}",
        "pyright: files analysed, errors": f"{num_files}, {num_errors}",
    }


def _unpack(revision: str, target: Path) -> None:
    archive = subprocess.run(
        ["git", "archive", revision], cwd=ROOT, check=True, capture_output=True
    ).stdout
    subprocess.run(["tar", "-x", "-C", str(target)], input=archive, check=True)
    (target / ".venv").symlink_to((ROOT / ".venv").resolve())


def main() -> None:
    """Print a table: the revision, if one is named, and the working tree."""
    columns: dict[str, dict[str, str]] = {}
    for revision in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            _unpack(revision, Path(folder))
            columns[revision] = measure(Path(folder))
    columns["now"] = measure(ROOT)
    print(f"{'':38}" + "".join(f"{name:>24}" for name in columns))
    for figure in columns["now"]:
        print(f"{figure:38}" + "".join(f"{column[figure]:>24}" for column in columns.values()))


if __name__ == "__main__":
    main()
