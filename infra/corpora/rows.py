"""Files of rows, lines of JSON or Parquet, and the files of a folder.

Rows of Parquet files, with the package `pyarrow`, which is an option of its own.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from penstock.infra.corpora.lines import LINE_BYTES_MAX, read_lines
from penstock.messages.errors import ConfigError
from penstock.messages.reading.parsing import parse_json

T = TypeVar("T")
_ROWS = 8
"""Read at once: some hundred bytes of dictionary and run lengths unpack to rows of any size."""
_BATCH_BYTES_MAX = _ROWS * LINE_BYTES_MAX
_GROUP_BYTES_MAX = 1 << 30
"""Of a row group's columns, unpacked: a page, and so the longest row, is read as a whole."""


def read_parquet(path: Path, kind: type[T], field: str) -> Iterator[tuple[str, T]]:
    """Yield the rows of a file, each with its place, `file:row`; rows count from 1.

    Only columns that the kind has are read. A column of text may hold JSON where the kind has a
    list or an object.

    Args:
        path: the file.
        kind: what each row is.
        field: the setting that named the file.

    Raises:
        ConfigError: `pyarrow` is not installed; a file that is no Parquet file or lacks a column; a
            row that is too long or not of the kind.

    """
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        text = "Parquet files are read with pyarrow, which is not installed"
        raise ConfigError(f"{field}: {path}: {text}: pip install -e '.[parquet]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            columns = _columns(set(file.schema_arrow.names), kind, f"{field}: {path}")
            _check_sizes(file.metadata, set(columns), f"{field}: {path}")
            number = 0
            for batch in file.iter_batches(batch_size=_ROWS, columns=columns):
                if batch.nbytes > _BATCH_BYTES_MAX:
                    place = f"{path}:{number + 1}"
                    text = f"expected at most {LINE_BYTES_MAX} bytes a row"
                    raise ConfigError(f"{field}: {place}: {text}")
                for row in batch.to_pylist():
                    number += 1
                    place = f"{path}:{number}"
                    yield place, _converted(row, kind, f"{field}: {place}")
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{field}: {path}: not a Parquet file that can be read: {error}"
        ) from error


def _check_sizes(metadata: Any, columns: set[str], where: str) -> None:
    """Refuse row groups that hold a row that is too long, or more than fits; reads none of them."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        parts = [group.column(index) for index in range(group.num_columns)]
        read = [part for part in parts if part.path_in_schema.partition(".")[0] in columns]
        size = sum(part.total_uncompressed_size for part in read)
        size_max = min(_GROUP_BYTES_MAX, group.num_rows * LINE_BYTES_MAX)
        if size > size_max:
            text = f"row group {number}, of {group.num_rows} rows, unpacks to {size} bytes"
            raise ConfigError(f"{where}: {text}: expected at most {size_max}; write smaller groups")


def _columns(found: set[str], kind: type[Any], where: str) -> list[str]:
    fields = msgspec.structs.fields(kind)
    missing = [each.encode_name for each in fields if each.required]
    missing = [name for name in missing if name not in found]
    if missing:
        text = f"expected a column {', '.join(missing)}, got {', '.join(sorted(found))}"
        raise ConfigError(f"{where}: {text}")
    return [each.encode_name for each in fields if each.encode_name in found]


def _converted(row: dict[str, Any], kind: type[T], where: str) -> T:
    """Return a row as its kind; what a struct column fills up with nulls is as if left out."""
    try:
        data = {name: _plain(value) for name, value in row.items() if value is not None}
        size = len(msgspec.json.encode(data))
        if size > LINE_BYTES_MAX:
            raise ConfigError(f"{where}: expected at most {LINE_BYTES_MAX} bytes, got {size}")
        parsed = {name: _parsed(value, name, kind) for name, value in data.items()}
        return msgspec.convert(parsed, kind)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: {error}") from error


def _parsed(value: Any, name: str, kind: type[Any]) -> Any:
    [field] = [each for each in msgspec.structs.fields(kind) if each.encode_name == name]
    is_json = isinstance(value, str) and field.type is not str
    return parse_json(value, field.type, name) if is_json else value


def _plain(value: object) -> object:
    """Return a value without what is null in it."""
    if isinstance(value, dict):
        table = cast("dict[str, object]", value)
        return {name: _plain(each) for name, each in table.items() if each is not None}
    if isinstance(value, list):
        return [_plain(each) for each in cast("list[object]", value)]
    return value


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
