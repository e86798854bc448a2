"""Scratch copies of the repository, of hard links: files there are replaced, never changed."""

import os
import shutil
from pathlib import Path

from tests.tidy.repository import PRODUCT, ROOT

COPIED = (
    *PRODUCT,
    *("docs", "examples", "tests", ".pyroot", ".ci", ".github", ".pre-commit-config.yaml"),
    *("Makefile", "pyproject.toml", "LICENSE"),
)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def copy(target: Path, names: tuple[str, ...] = (), root: Path = ROOT) -> Path:
    """Copy some files and folders; by default all that a gate reads, and the documents."""
    skipped = shutil.ignore_patterns("__pycache__")
    for name in names or (*COPIED, *(path.name for path in root.glob("*.md"))):
        if (root / name).is_dir():
            shutil.copytree(
                root / name, target / name, symlinks=True, ignore=skipped, copy_function=_link
            )
        elif (root / name).exists():
            _link(str(root / name), str(target / name))
    return target


def write(root: Path, files: dict[str, str]) -> None:
    """Write files into a copy; what was linked there is replaced, not changed."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")


def edit(root: Path, name: str, old: str, new: str) -> None:
    """Replace the first place of a text in a file of a copy."""
    text = (root / name).read_text(encoding="utf-8")
    assert old in text, f"{name}: no {old!r}"
    write(root, {name: text.replace(old, new, 1)})
