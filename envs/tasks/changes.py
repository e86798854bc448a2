"""What an episode left behind in its machine: the files that a judge will put into a fresh one."""

from collections.abc import Collection, Mapping
from pathlib import PurePosixPath

import msgspec

from penstock.envs.sandbox import WORK_DIR, Sandbox, SandboxFileError
from penstock.messages.errors import PenstockError

_SEALED_FOLDERS = frozenset({"__pycache__", ".git", ".pytest_cache"})
"""Never carried over: bytecode and history could smuggle in what the sources do not show."""


_TOUCHED = ("find", ".", "-type", "f", "-newerct", "@86400", "-print0")
"""A layer's files have the time 0, and what a program writes, moves or copies has its own: when an
inode changed is not a program's to set."""
TOUCHED_S_MAX = 60.0
TOUCHED_BYTES_MAX = 1 << 20


class ChangesError(PenstockError, ValueError):
    """The changed files cannot be carried over: the policy's own fault."""


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between a task's files and what is there now."""

    files: dict[str, bytes] = {}
    """Changed or added."""
    deleted: list[str] = []


async def list_work(sandbox: Sandbox) -> list[str]:
    """Return the files of the working directory that can be carried over.

    Raises:
        SandboxError: The machine failed, or cannot read it.

    """
    return [
        path
        for path in await sandbox.list_files(WORK_DIR)
        if _SEALED_FOLDERS.isdisjoint(PurePosixPath(path).parts)
    ]


async def read_changes(  # noqa: PLR0913 - what was there, and the bounds
    sandbox: Sandbox,
    initial: Mapping[str, bytes],
    *,
    num_files_max: int,
    num_bytes_max: int,
    has_layer: bool = False,
    layer_files: Collection[str] = (),
) -> Changes:
    """Compare the working directory with the task's files.

    Args:
        sandbox: The machine.
        initial: The task's files.
        num_files_max: Files that may be new, or gone.
        num_bytes_max: Of all changed files.
        has_layer: Whether an image layer may have brought files, too.
        layer_files: Those, as far as they are known: others are not missed.

    Raises:
        ChangesError: More files, or more bytes in changed files, than the bounds; or the
            working directory or a file in it cannot be read.
        SandboxError: The machine failed.

    """
    try:
        there = await list_work(sandbox)
    except SandboxFileError as error:
        raise ChangesError(f"{WORK_DIR}: {error}") from error
    deleted = sorted({*initial, *layer_files}.difference(there))
    touched = await _touched(sandbox) if has_layer else set(there)
    paths = [path for path in there if path in touched]
    if max(len(paths), len(deleted)) > len(initial) + num_files_max:
        words = f"{len(paths)} files are there, {len(deleted)} are gone"
        raise ChangesError(f"{words}, {num_files_max} may be new or gone")
    files: dict[str, bytes] = {}
    num_bytes = 0
    for path in paths:
        had = initial.get(path)
        data = await _read(sandbox, path, max(num_bytes_max, len(had or b"")))
        if data == had:
            continue
        files[path] = data
        num_bytes += len(data)
        if num_bytes > num_bytes_max:
            raise ChangesError(f"changed files hold more than {num_bytes_max} bytes")
    return Changes(files=files, deleted=deleted)


async def _touched(sandbox: Sandbox) -> set[str]:
    """Return the files that are not as a layer brought them, whatever their content."""
    done = await sandbox.exec(_TOUCHED, timeout_s=TOUCHED_S_MAX, output_bytes_max=TOUCHED_BYTES_MAX)
    if done.timed_out or done.truncated or done.exit_code not in {0, 1}:  # 1: a closed folder.
        raise ChangesError(f"{WORK_DIR}: its changed files are too many to be listed")
    names = done.stdout.decode("utf-8", "replace").split("\0")
    return {name.removeprefix("./") for name in names}


async def _read(sandbox: Sandbox, path: str, num_bytes_max: int) -> bytes:
    try:
        return await sandbox.read_file(path, num_bytes_max + 1)
    except SandboxFileError as error:
        raise ChangesError(f"{path}: {error}") from error
