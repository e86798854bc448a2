"""What may be read and written, and how names that came from outside are shown."""

from collections.abc import Iterable
from pathlib import Path

from penstock.messages.errors import ConfigError, NotFoundError

FILES_MAX = 10_000
"""Of a checkpoint: all are open at once."""
_NAME_BYTES_MAX = 255


def is_portable(path: str) -> bool:
    """Say whether a path of a folder's file stays in that folder, and means one file everywhere."""
    parts = path.split("/")
    return (
        path.isprintable()
        and not any(character in path for character in "\\:")
        and not any(
            part in ("", ".", "..") or len(part.encode()) > _NAME_BYTES_MAX for part in parts
        )
    )


def require_file(path: Path) -> None:
    """Demand a regular file: a pipe could keep its reader waiting for good.

    Raises:
        NotFoundError: there is nothing.
        ConfigError: it is something else.

    """
    if not path.exists():
        raise NotFoundError(f"{path}: there is no such file")
    if not path.is_file():
        raise ConfigError(f"{path}: expected a file, got a folder, a pipe or a device")


def require_apart(output: Path, inputs: Iterable[Path]) -> None:
    """Demand that writing `output` changes none of `inputs`.

    Raises:
        ConfigError: it is one of them, or lies in one of them.

    """
    for path in inputs:
        if output.resolve().is_relative_to(path.resolve()):
            raise ConfigError(f"{output}: is, or lies in, {path}, which is read; name another")


def printable(name: str) -> str:
    """Return a name with what a terminal could take for a command spelled out."""
    return name if name.isprintable() else repr(name)[1:-1]
