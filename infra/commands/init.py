"""`penstock init DIR`: creates a project as a copy of an example."""

import argparse
import shutil
from pathlib import Path

from penstock.infra.output import print_line

_EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGED = "quickstart"
"""Example that is a package, which the copy's configuration imports under this name."""
_LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "runs")


def init_command(arguments: argparse.Namespace) -> int:
    """Copy the example without replacing any file.

    Raises:
        FileExistsError: The folder is not empty.

    """
    folder: Path = arguments.folder
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: expected a new or empty folder")
    source = _EXAMPLES / arguments.example
    if arguments.example == PACKAGED:
        package = folder / PACKAGED
        shutil.copytree(source, package, ignore=_LEFT_OUT, dirs_exist_ok=True)
        (package / "README.md").rename(folder / "README.md")
        config = package / "config.toml"
        # The copy is imported from the project's folder, not from the installed package.
        text = config.read_text().replace(f"penstock.examples.{PACKAGED}", PACKAGED)
        (folder / "config.toml").write_text(text)
        config.unlink()
        print_line(f"{folder}: cd there, then: penstock run --config config.toml")
        return 0
    shutil.copytree(source, folder, ignore=_LEFT_OUT, dirs_exist_ok=True)
    print_line(f"{folder}: cd there, then: python -m pytest; penstock run --config config.toml")
    return 0
