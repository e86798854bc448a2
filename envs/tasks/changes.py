"""What an episode changed in its working directory: bytes, and all other state of its files.

```
 the task's files and states, its layer's ─▶ before ─┐
 one listing of the machine ─▶ now ──────────────────┴─▶ what must be read ─▶ Changes
```
`lay_out` applies the changes to a fresh machine with the task's files.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from types import MappingProxyType

import msgspec

from penstock.envs.sandbox import Sandbox, SandboxError, SandboxFileError
from penstock.envs.tasks.file_states import (
    ListedFile,
    ListingError,
    list_states,
    read_odd_name,
    set_modes,
)
from penstock.messages.errors import PenstockError
from penstock.messages.task import FOLDER_MODE, FileKind, FileState

_PLAIN = {FileKind.FILE, FileKind.HARD_LINK}
"""Those that `Changes.deleted` names."""
_READABLE = 0o400
_OPENED = 0o600


class ChangesError(PenstockError, ValueError):
    """The changed files cannot be carried over, which is the policy's fault."""


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between a task's files and what is there now."""

    files: dict[str, bytes] = {}
    """Changed or added, in the order in which they were written."""
    deleted: list[str] = []
    states: list[FileState] = []
    """Other changes: modes, links, folders, names that are not UTF-8."""

    def __bool__(self) -> bool:
        """Whether there is a difference."""
        return bool(self.files or self.deleted or self.states)


async def list_work(sandbox: Sandbox) -> dict[bytes, FileState]:
    """Return the files of the working directory that can be carried over.

    Raises:
        SandboxError: It cannot be listed, or the machine failed.

    """
    try:
        seen = await list_states(sandbox)
    except ListingError as error:
        raise SandboxError(str(error)) from error
    return {path: one.state for path, one in seen.items()}


async def read_changes(  # noqa: PLR0913 - what was there, and the bounds
    sandbox: Sandbox,
    initial: Mapping[str, bytes],
    *,
    num_files_max: int,
    num_bytes_max: int,
    states: Collection[FileState] = (),
    has_layer: bool = False,
    layer: Mapping[bytes, FileState] = MappingProxyType({}),
) -> Changes:
    """Compare the working directory with the task's files.

    Args:
        sandbox: The machine.
        initial: The task's files.
        num_files_max: Maximum files that may be new or deleted.
        num_bytes_max: Maximum bytes of all changed files.
        states: State of the task's files besides their bytes.
        has_layer: Whether an image layer may have added files.
        layer: Those files, as far as they are known; others do not count as deleted.

    Raises:
        ChangesError: The changed files exceed a bound; or the working directory or a file in it
        cannot be read.
        SandboxError: The machine failed.

    """
    reader = _Reader(sandbox, initial, states, num_bytes_max)
    before = dict(layer) | {one.path: one for one in _written(initial, states)}
    try:
        seen = await list_states(sandbox, has_layer=has_layer)
        _check_count(before, seen, len(initial), num_files_max)
        closed = {path: one.state.mode for path, one in seen.items() if _is_closed(one)}
        files = (path for path in closed if seen[path].state.kind is FileKind.FILE)
        await set_modes(sandbox, dict.fromkeys(files, _OPENED))
        made = set(layer) | {one.path for one in states}
        changes = await reader.read(seen, before, made)
        await set_modes(sandbox, closed)  # A later step finds them unchanged.
    except ListingError as error:
        raise ChangesError(str(error)) from error
    return changes


def _written(files: Mapping[str, bytes], states: Iterable[FileState]) -> Iterator[FileState]:
    """Yield the paths that exist once a task is laid out, including the folders of its files."""
    for path in files:
        for folder in list(PurePosixPath(path).parents)[:-1]:
            name = str(folder).encode("utf-8", "surrogatepass")
            yield FileState(path=name, kind=FileKind.FOLDER, mode=FOLDER_MODE)
        yield FileState(path=path.encode("utf-8", "surrogatepass"))
    yield from (msgspec.structs.replace(one, data=None, hole_bytes=0) for one in states)


def _check_count(
    before: Mapping[bytes, FileState],
    seen: Mapping[bytes, ListedFile],
    num_initial: int,
    num_max: int,
) -> None:
    gone = [one for path, one in before.items() if path not in seen]
    now = [one.state for one in seen.values() if one.is_touched]
    num_gone, num_now = (sum(one.kind is not FileKind.FOLDER for one in few) for few in (gone, now))
    num_folders = max(len(gone) - num_gone, len(now) - num_now)
    if max(num_now, num_gone) > num_initial + num_max or num_folders > num_max + len(before):
        words = f"{num_now} files and {len(now) - num_now} folders are there, {num_gone} are gone"
        raise ChangesError(f"{words}, {num_max} may be new or gone")


def _is_closed(one: ListedFile) -> bool:
    bits = {FileKind.FILE: _READABLE, FileKind.FOLDER: 0o500}.get(one.state.kind, 0)
    return one.is_touched and one.state.mode & bits != bits


def _is_other(now: ListedFile) -> bool:
    """Return whether a file was replaced by something else."""
    return now.is_touched and now.state.kind not in _PLAIN


class _Reader:
    """Reads the differences, within a bound."""

    def __init__(
        self,
        sandbox: Sandbox,
        initial: Mapping[str, bytes],
        states: Iterable[FileState],
        num_bytes_max: int,
    ) -> None:
        self._sandbox, self._initial, self._num_bytes_max = sandbox, initial, num_bytes_max
        self._odd = {one.path: one.data for one in states if one.data is not None}
        self._num_bytes = 0
        self._files: dict[str, bytes] = {}

    async def read(
        self,
        seen: Mapping[bytes, ListedFile],
        before: Mapping[bytes, FileState],
        made: Collection[bytes],
    ) -> Changes:
        """Return the differences; `made` has the paths that exist without bytes of the task."""
        deleted: list[str] = []
        states: dict[bytes, FileState] = {}
        for path, was in before.items():
            name = was.name if was.kind in _PLAIN else None
            now = seen.get(path)
            if now is None and name is None and (was.kind is not FileKind.FOLDER or path in made):
                states[path] = FileState(path=path, kind=FileKind.GONE)
            elif name is not None and (now is None or _is_other(now)):
                deleted.append(name)
        filled = {
            folder
            for path, one in seen.items()
            if not one.is_touched or one.state.kind is not FileKind.FOLDER
            for folder in _above(path)
        }
        touched = [one for one in seen.values() if one.is_touched]
        for one in sorted(touched, key=lambda one: (one.written_ns, one.state.path)):
            path = one.state.path
            was = before.get(path)
            if one.state.kind is FileKind.FILE:
                state, is_changed = await self._content(one)
                plain = FileState(path=path)
                is_told = state == (plain if is_changed else was or plain)
            else:
                state, is_told = one.state, one.state == was
            if state.kind is FileKind.FOLDER:
                is_held = path in filled
                is_told = is_told and (is_held or path in made)
                is_told |= was is None and is_held and state.mode == FOLDER_MODE
            if not is_told:
                states[path] = state
        for one in touched:  # A file that is written again is no longer linked to its other names.
            target = one.state.target
            if one.state.kind is FileKind.HARD_LINK and os.fsdecode(target) in self._files:
                states[one.state.path] = one.state
        return Changes(
            files=self._files,
            deleted=sorted(deleted),
            states=[states[path] for path in sorted(states)],
        )

    async def _content(self, one: ListedFile) -> tuple[FileState, bool]:
        """Read a file; return its complete state, and whether its bytes changed."""
        state, name = one.state, one.state.name
        if one.is_hole and one.size > self._num_bytes_max:
            return msgspec.structs.replace(state, hole_bytes=one.size), True
        left = self._num_bytes_max - self._num_bytes
        if name is None:
            data = await read_odd_name(self._sandbox, state.path, left + 1)
            if data == self._odd.get(state.path):
                return state, False
            self._count(len(data))
            return msgspec.structs.replace(state, data=data), True
        had = self._initial.get(name)
        data = await self._bytes_of(name, max(self._num_bytes_max, len(had or b"")) + 1)
        if data == had:
            return state, False
        self._files[name] = data
        self._count(len(data))
        return state, True

    async def _bytes_of(self, path: str, num_bytes_max: int) -> bytes:
        try:
            return await self._sandbox.read_file(path, num_bytes_max)
        except SandboxFileError as error:
            raise ChangesError(f"{path}: {error}") from error

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > self._num_bytes_max:
            raise ChangesError(f"changed files hold more than {self._num_bytes_max} bytes")


def _above(path: bytes) -> Iterator[bytes]:
    """Yield the folders above a relative path."""
    while b"/" in path:
        path = path.rpartition(b"/")[0]
        yield path
