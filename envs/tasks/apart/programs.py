"""Assembles the guest's programs as texts, which are written into a machine for grading."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path, PurePosixPath

import msgspec

TESTS_FOLDER = "/tests/apart"
"""Folder for the verifier's files of a task with a peer."""
VERIFIER_FOLDER = "/tests/.apart"
_PYTHON = ("python3", "-I", "-S", "-B")
_IMPORT = "from penstock.envs.tasks.apart."


@cache
def program(*names: str) -> str:
    """Return programs of this folder as one text, after `pipe.py`."""
    here = Path(__file__).resolve().parent
    lines = [
        line
        for name in ("pipe", *names)
        for line in (here / f"{name}.py").read_text().splitlines()
        if not line.startswith(_IMPORT)
    ]
    return "\n".join(lines) + "\n"


def modules_peer() -> list[str]:
    """Return the command of the process that holds the modules of `/work` and `/work/src`."""
    return [*_PYTHON, "-c", program("code_side"), "modules", ".", "src"]


def commands_peer() -> list[str]:
    """Return the command of the process that runs commands for a foreign verifier."""
    return [*_PYTHON, "-c", program("code_side"), "commands"]


def verifier_argv() -> list[str]:
    """Return the command that runs a foreign verifier apart from the code under test."""
    return [*_PYTHON, f"{VERIFIER_FOLDER}/verifier.py"]


def suite_argv() -> list[str]:
    """Return the command that runs tests apart from the code under test."""
    return [*_PYTHON, f"{TESTS_FOLDER}/tests_side.py"]


def suite_files(
    tests: Mapping[str, str], code: Iterable[str], modules: Iterable[str], wanted: Iterable[str]
) -> dict[str, str]:
    """Return the verifier's files for tests that import the code under test.

    Args:
        tests: Test modules and other files of their folders, by path in the repository.
        code: Paths of the code under test.
        modules: Paths of the test modules to run.
        wanted: Names of the tests to report, in this order; empty for all.

    """
    code_paths = [_below_src(path) for path in code]
    code_folders = {parent for path in code_paths for parent in path.parents}
    test_paths = [_below_src(path) for path in tests if path.endswith(".py")]
    local = {_dotted(path) for path in test_paths} | {
        _dotted(parent / "__init__.py")
        for path in test_paths
        for parent in path.parents
        if parent.name and parent not in code_folders
    }
    asked = {
        "modules": [_dotted(_below_src(path)) for path in sorted(modules)],
        "names": sorted({_dotted(path).partition(".")[0] for path in code_paths} - {""}),
        "local": sorted(local),
        "wanted": list(wanted),
        "peer": modules_peer(),
    }
    files = {f"tree/{path}": text for path, text in tests.items()}
    files |= {
        "tests_side.py": program("stand_ins", "tests_side"),
        "tests.json": msgspec.json.encode(asked).decode(),
    }
    return {f"{TESTS_FOLDER}/{path}": text for path, text in files.items()}


def _below_src(path: str) -> PurePosixPath:
    return PurePosixPath(path.removeprefix("src/"))


def _dotted(path: PurePosixPath) -> str:
    return ".".join(path.parts).removesuffix(".py").removesuffix(".__init__")
