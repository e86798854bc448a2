"""Checks of paths to read and write, and printing of untrusted names."""

from collections.abc import Iterable
from pathlib import Path

from penstock.messages.errors import ConfigError, NotFoundError

FILES_MAX = 10_000
"""Maximum files of a checkpoint, which are all open at once."""
_NAME_BYTES_MAX = 255


def is_portable(path: str) -> bool:
    """Return whether a path stays in its folder and is valid on all systems."""
    parts = path.split("/")
    return (
        path.isprintable()
        and not any(character in path for character in "\\:")
        and not any(
            part in ("", ".", "..") or len(part.encode()) > _NAME_BYTES_MAX for part in parts
        )
    )


def require_file(path: Path) -> None:
    """Require a regular file; a pipe could block its reader forever.

    Raises:
        NotFoundError: The path does not exist.
        ConfigError: The path is not a regular file.

    """
    if not path.exists():
        raise NotFoundError(f"{path}: there is no such file")
    if not path.is_file():
        raise ConfigError(f"{path}: expected a file, got a folder, a pipe or a device")


def require_apart(output: Path, inputs: Iterable[Path]) -> None:
    """Require that writing `output` does not change any of `inputs`.

    Raises:
        ConfigError: The output is one of the inputs, or is inside one.

    """
    for path in inputs:
        if output.resolve().is_relative_to(path.resolve()):
            raise ConfigError(f"{output}: is, or lies in, {path}, which is read; name another")


def printable(name: str) -> str:
    """Return a name with control characters escaped."""
    return name if name.isprintable() else repr(name)[1:-1]
