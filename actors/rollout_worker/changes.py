"""What an episode left behind in its machine: the files that a judge will put into a fresh one."""

from collections.abc import Mapping
from pathlib import PurePosixPath

import msgspec

from penstock.envs.sandbox import WORK_DIR, Sandbox, SandboxFileError
from penstock.messages.errors import PenstockError

_SEALED_FOLDERS = frozenset({"__pycache__", ".git", ".pytest_cache"})
"""Never carried over: bytecode and history could smuggle in what the sources do not say."""


class ChangesError(PenstockError, ValueError):
    """What the episode left behind cannot be carried over: the policy's own fault."""


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between a task's files and what is there now."""

    files: dict[str, bytes] = {}
    """Changed or added."""
    deleted: list[str] = []


async def read_changes(
    sandbox: Sandbox, initial: Mapping[str, str], *, num_files_max: int, num_bytes_max: int
) -> Changes:
    """Compare the working directory with the task's files.

    Raises:
        ChangesError: More files, or more bytes in changed files, than the bounds; or the
            working directory or a file in it cannot be read.
        SandboxError: The machine failed.

    """
    paths = await _list(sandbox)
    if len(paths) > len(initial) + num_files_max:
        raise ChangesError(f"{len(paths)} files are there, {num_files_max} may be new")
    files: dict[str, bytes] = {}
    num_bytes = 0
    for path in paths:
        data = await _read(sandbox, path, num_bytes_max)
        if path in initial and data == initial[path].encode():
            continue
        files[path] = data
        num_bytes += len(data)
        if num_bytes > num_bytes_max:
            raise ChangesError(f"changed files hold more than {num_bytes_max} bytes")
    return Changes(files=files, deleted=sorted(set(initial) - set(paths)))


def is_sealed(path: str) -> bool:
    """Tell whether a path is never carried over."""
    return not _SEALED_FOLDERS.isdisjoint(PurePosixPath(path).parts)


async def _list(sandbox: Sandbox) -> list[str]:
    try:
        return [path for path in await sandbox.list_files(WORK_DIR) if not is_sealed(path)]
    except SandboxFileError as error:
        raise ChangesError(f"{WORK_DIR}: {error}") from error


async def _read(sandbox: Sandbox, path: str, num_bytes_max: int) -> bytes:
    try:
        return await sandbox.read_file(path, num_bytes_max + 1)
    except SandboxFileError as error:
        raise ChangesError(f"{path}: {error}") from error
