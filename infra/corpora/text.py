"""Plain text for continued pre-training: folders of files, single files, and lines of JSON."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from penstock.infra.corpora.lines import existing, read_lines
from penstock.messages.errors import ConfigError

FIELD = "model.text"
_FILE_BYTES_MAX = 4 << 20


class TextLine(msgspec.Struct, frozen=True):
    """One line of a `.jsonl` file; further fields are passed over."""

    text: str


def read_texts(paths: Sequence[str]) -> Iterator[str]:
    """Yield every document: a folder's files by name, a file, or a `.jsonl` file's lines.

    Of a folder, hidden and linked files, those above 4 MiB, and those that are no UTF-8 are left
    out; a file that is named itself must be readable.

    Raises:
        ConfigError: A path that is not there, or a file or line that is no text.

    """
    for given in paths:
        path = existing(given, FIELD)
        if path.is_dir():
            yield from _of_folder(path)
        elif path.suffix == ".jsonl":
            yield from (line.text for _, line in read_lines(path, TextLine, FIELD))
        else:
            text = _text_of(path)
            if text is None:
                raise ConfigError(
                    f"{FIELD}: {path}: expected UTF-8 of at most {_FILE_BYTES_MAX} bytes"
                )
            yield text


def _of_folder(folder: Path) -> Iterator[str]:
    found = False
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        is_plain = path.is_file() and not path.is_symlink()
        if is_plain and not any(part.startswith(".") for part in parts):
            text = _text_of(path)
            if text:
                found = True
                yield text
    if not found:
        raise ConfigError(f"{FIELD}: {folder}: expected text files below this folder")


def _text_of(path: Path) -> str | None:
    if path.stat().st_size > _FILE_BYTES_MAX:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text
