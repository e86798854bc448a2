"""Plain text for continued pre-training: folders, files, and rows with a text."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.infra.corpora.lines import existing
from penstock.infra.corpora.rows import ROW_SUFFIXES, files_of, read_rows
from penstock.messages.errors import ConfigError

_FILE_BYTES_MAX = 4 << 20


class TextRow(msgspec.Struct, frozen=True):
    """A line of a `.jsonl` file or a row of a `.parquet` file; other fields are ignored."""

    text: str


def read_texts(given: str, field: str) -> Iterator[str]:
    """Yield every document: a folder's files by name, a single file, or the rows of files.

    In a folder, hidden files and links are skipped, and so are texts above 4 MiB or not in UTF-8.

    Raises:
        ConfigError: The path does not exist, or the file or a row is not text.

    """
    path, num_found = existing(given, field), 0
    for file in files_of(path):
        if file.suffix in ROW_SUFFIXES:
            for _, row in read_rows(file, TextRow, field):
                num_found += 1
                yield row.text
            continue
        text = _text_of(file)
        # Files of a folder are skipped silently; a file that the user named is not.
        if text is None and file == path:
            text = f"expected UTF-8 of at most {_FILE_BYTES_MAX} bytes"
            raise ConfigError(f"{field}: {path}: {text}")
        if text:
            num_found += 1
            yield text
    if not num_found:
        raise ConfigError(f"{field}: {path}: expected texts, there are none")


def _text_of(path: Path) -> str | None:
    if path.stat().st_size > _FILE_BYTES_MAX:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text
