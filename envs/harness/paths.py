"""Paths that the policy writes: inside the working directory or refused."""

from pathlib import PurePosixPath

from penstock.envs.harness.result import InvalidCallError
from penstock.envs.sandbox import WORK_DIR

_NUM_CHARACTERS_MAX = 255


def checked_path(path: str) -> str:
    """Return a path relative to the working directory, in its shortest form.

    An absolute path below the working directory is accepted.

    Raises:
        InvalidCallError: empty, too long, not printable, or outside the working directory.

    """
    if not path.strip() or len(path) > _NUM_CHARACTERS_MAX or not path.isprintable():
        raise InvalidCallError(f"path must be 1 to {_NUM_CHARACTERS_MAX} printable characters")
    pure = PurePosixPath(path.strip())
    if pure.is_absolute():
        if not pure.is_relative_to(WORK_DIR):
            raise InvalidCallError(f"path is outside {WORK_DIR}")
        pure = pure.relative_to(WORK_DIR)
    if ".." in pure.parts:
        raise InvalidCallError("path must not hold ..")
    return str(pure)
