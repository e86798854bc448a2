"""Reads untrusted files of JSON lines; each error names the file and the line."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.messages.errors import ConfigError

T = TypeVar("T")
LINE_BYTES_MAX = 16 << 20


def read_lines(path: Path, kind: type[T], field: str) -> Iterator[tuple[str, T]]:
    """Yield (`file:line`, object) for each non-empty line.

    Raises:
        ConfigError: The file cannot be opened, or a line is too long, not JSON, or not of the type.

    """
    decoder = msgspec.json.Decoder(kind)
    try:
        opened = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{field}: {error}") from error
    with opened as file:
        for number in range(1, 1 << 62):
            # Bounded: a file without line ends must not fill the memory.
            line = file.readline(LINE_BYTES_MAX + 1)
            if not line:
                return
            place = f"{path}:{number}"
            if len(line) > LINE_BYTES_MAX:
                raise ConfigError(f"{field}: {place}: expected at most {LINE_BYTES_MAX} bytes")
            if line.strip():
                try:
                    yield place, decoder.decode(line)
                except (ValueError, RecursionError) as error:
                    raise ConfigError(f"{field}: {place}: {error}") from error


def existing(given: str, field: str) -> Path:
    """Return a file or folder that a setting names.

    Raises:
        ConfigError: The path does not exist, or is a pipe or a device.

    """
    try:
        path = Path(given).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{field}: {given}: {error}") from error
    if not path.exists():
        raise ConfigError(f"{field}: {path}: no such file or folder")
    if not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{field}: {path}: expected a file or folder")
    return path
