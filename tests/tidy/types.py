"""The type check: `python -m tests.tidy.types`. Pyright, and proof that it looked.

Pyright reports "0 errors" too when its settings make it look at nothing (a hidden folder is left
out without a word). So this reads its summary and fails unless enough files were analysed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.tidy.repository import ROOT

FILES_MIN = 400


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
    if num_files < files_min:
        faults.append(f"only {num_files} files analysed, at least {files_min} expected")
    return faults, num_files


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
