"""`penstock init DIR`: write a project of one's own."""

import argparse
from pathlib import Path

from penstock.infra.scaffold.files import CONFIG, OWN, README, TEST

_QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.toml"


def init_command(arguments: argparse.Namespace) -> int:
    """Write the files; nothing that is there is replaced.

    Raises:
        FileExistsError: The folder holds something.

    """
    folder: Path = arguments.folder
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: expected a new or empty folder")
    (folder / "tests").mkdir(parents=True, exist_ok=True)
    files = {
        "config.toml": CONFIG,
        "base.toml": _QUICKSTART.read_text(),
        "own.py": OWN,
        "tests/test_own.py": TEST,
        "README.md": README,
        "conftest.py": '"""Has tests find own.py beside it."""\n',
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    print(f"{folder}: cd there, then: python -m pytest; penstock run --config config.toml")
    return 0
