"""The type check: `python -m tests.tidy.types`. Pyright, and proof that it looked.

Pyright reports "0 errors" too when its settings make it look at nothing (a hidden folder is left
out without a word). So this reads its summary and fails unless enough files were analysed, and
finds the settings that take a folder or a kind of error out of the check.
"""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.repository import PRODUCT, ROOT

FILES_MIN = 400
CHECKED = (*PRODUCT, "examples", "tests/lab", "tests/support")
STRICT = ("messages", "actors/runtime", "infra", "gateway")


def type_faults(root: Path = ROOT, files_min: int = FILES_MIN) -> tuple[list[str], int]:
    """Run pyright in a folder by its own settings.

    Returns:
        What is wrong, and the number of files analysed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson"],
        cwd=root,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},  # no look-up of newer versions
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return [f"pyright gave no report: {done.stdout}{done.stderr}"], 0
    faults = [
        f"{_relative(each['file'], root)}:{each['range']['start']['line'] + 1}: "
        f"{each['message']} ({each.get('rule', 'error')})"
        for each in found["generalDiagnostics"]
        if each["severity"] == "error" and "range" in each
    ]
    num_files = found["summary"]["filesAnalyzed"]
    if found["summary"]["errorCount"] > len(faults):
        faults.append(f"pyright counts {found['summary']['errorCount']} errors")
    faults += setting_faults(root)
    if num_files < files_min:
        faults.append(f"only {num_files} files analysed, at least {files_min} expected")
    return faults, num_files


def setting_faults(root: Path) -> Iterator[str]:
    """Yield what in pyright's settings makes it see less than it should."""
    if (root / "pyrightconfig.json").exists():
        yield "pyrightconfig.json replaces the settings of pyproject.toml"
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    settings = tomllib.loads(text)["tool"]["pyright"]
    for key, expected in (("include", CHECKED), ("strict", STRICT)):
        for missing in sorted({*expected} - {*settings.get(key, ())}):
            yield f"pyproject.toml: tool.pyright.{key} lacks {missing}"
    if settings.get("typeCheckingMode") not in {"standard", "strict"}:
        yield "pyproject.toml: tool.pyright.typeCheckingMode is not standard or strict"
    for key, value in settings.items():
        is_weaker = key.startswith("report") and value in (False, "none", "warning", "information")
        if key in {"exclude", "ignore"} or (is_weaker and key != "reportMissingTypeStubs"):
            yield f"pyproject.toml: tool.pyright.{key} hides errors"


def _relative(file: str, root: Path) -> str:
    path = Path(file)
    return str(path.relative_to(root)) if path.is_relative_to(root) else file


def main() -> None:
    """Print what is wrong; exit with 1 if there is anything."""
    faults, num_files = type_faults()
    for fault in faults:
        print(fault)
    print(f"types: {num_files} files analysed, {len(faults)} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
