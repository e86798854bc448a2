"""Files of rows, lines of JSON or Parquet, and the files of a folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from penstock.infra.corpora.lines import read_lines
from penstock.infra.corpora.parquet import read_parquet

T = TypeVar("T")
ROW_SUFFIXES = frozenset({".jsonl", ".parquet"})


def files_of(path: Path) -> Iterator[Path]:
    """Yield a file, or a folder's files by name, without hidden and linked ones."""
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*")):
        parts = file.relative_to(path).parts
        is_plain = file.is_file() and not file.is_symlink()
        if is_plain and not any(part.startswith(".") for part in parts):
            yield file


def read_rows(path: Path, kind: type[T], field: str) -> Iterator[tuple[str, T]]:
    """Yield the rows of a file with their places; as `read_lines` and `read_parquet`."""
    read = read_parquet if path.suffix == ".parquet" else read_lines
    return read(path, kind, field)
