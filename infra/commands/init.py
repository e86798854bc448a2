"""`penstock init DIR`: a project of one's own, as a copy of an example."""

import argparse
import shutil
from pathlib import Path

from penstock.infra.output import print_line

_EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGED = "quickstart"
"""An example that is a package: the copy's configuration names it by the package's own name."""
_LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "runs")


def init_command(arguments: argparse.Namespace) -> int:
    """Copy the example; nothing that is there is replaced.

    Raises:
        FileExistsError: The folder holds something.

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
        text = config.read_text().replace(f"penstock.examples.{PACKAGED}", PACKAGED)
        (folder / "config.toml").write_text(text)
        config.unlink()
        print_line(f"{folder}: cd there, then: penstock run --config config.toml")
        return 0
    shutil.copytree(source, folder, ignore=_LEFT_OUT, dirs_exist_ok=True)
    print_line(f"{folder}: cd there, then: python -m pytest; penstock run --config config.toml")
    return 0
