"""A user's checkout in a sandbox: git runs nothing later that a model left in it."""

import contextlib
import os
import shutil
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from penstock.envs.microvm.machine import GuestSandbox
from penstock.envs.microvm.process import ProcessBackend
from penstock.envs.sandbox import WORK_DIR
from penstock.messages.errors import NotFoundError

_LISTABLE = 0o500
_PATH_BYTES = 4000
"""Beyond it neither git nor anyone else opens a folder."""


class CheckoutBackend(ProcessBackend):
    """Starts sandboxes over a folder of this host at `/work`, everything else read-only.

    The agent's programs run under bubblewrap with the guest agent of the microVMs as their first
    process, so paths, environment, limits and wording are those of training. There is no network.
    The isolation class is `process`: this is for a user's own code, not for hostile code. What git
    runs on its own is out of the model's reach: every repository's internals are read-only, and
    `remove_planted` takes away those that were not there before.

    Args:
        folder: Becomes the working directory, writable.
        cache: Folder with the guest agent.

    Raises:
        NotFoundError: It is not a folder, or itself a bare repository, or a link leads to one.
        BackendUnavailable: The guest agent or bubblewrap is missing.

    """

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        if not folder.is_dir():
            raise NotFoundError(f"{folder}: expected a folder")
        folder = folder.resolve()
        self._folder, repositories = folder, find_repositories(folder)
        if folder in repositories:
            raise NotFoundError(f"{folder}: expected a checkout, not a bare repository")
        for path in repositories:
            if path.is_symlink():
                raise NotFoundError(f"{path}: expected a repository's own folder, not a link")
        self._known = set(repositories.values())
        self._closed = _closed_folders(folder)
        """The user's own that cannot be listed."""
        mounts = ["--bind", str(folder), WORK_DIR]
        for path in sorted(repositories):
            mounts += ["--ro-bind", str(path), f"{WORK_DIR}/{path.relative_to(folder)}"]
        super().__init__(cache, mounts=mounts)

    def remove_planted(self) -> list[Path]:
        """Remove repositories that the model made; return where they were."""
        _open_folders(self._folder, self._closed)
        found = find_repositories(self._folder)
        planted = sorted(path for path, inode in found.items() if inode not in self._known)
        for path in planted:
            _remove(path)
        return planted


def _remove(path: Path) -> None:
    """Make git take a path for no repository, then remove what can be removed of it."""
    path.parent.chmod(path.parent.stat().st_mode | 0o700)
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    path.chmod(0o700)
    (path / "HEAD").unlink(missing_ok=True)  # Without one it is none.
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)


def find_repositories(folder: Path) -> dict[Path, int]:
    """Return what git would take for a repository below a folder, itself included, with its inode.

    Those are entries called `.git` in any case of letters, and bare ones: a folder with a HEAD
    beside objects and refs, or beside a file that says where they are. Git runs programs that
    their configuration and hooks name.
    """
    found: list[Path] = []
    waiting = [folder]
    while waiting:
        root = waiting.pop()
        names, folders = _listed(root)
        found += [root / name for name in names if name.lower() == ".git"]
        if "HEAD" in names and (names >= {"objects", "refs"} or "commondir" in names):
            found.append(root)
        else:
            waiting += folders
    return {path: path.lstat().st_ino for path in found}


def _closed_folders(folder: Path) -> set[int]:
    """Return the inodes of folders that cannot be listed, though git may enter them."""
    waiting, closed = [folder], set[int]()
    while waiting:
        root = waiting.pop()
        if (state := root.lstat()).st_mode & _LISTABLE != _LISTABLE:
            closed.add(state.st_ino)
        waiting += _listed(root)[1]
    return closed


def _open_folders(folder: Path, closed: set[int]) -> None:
    """Make all folders ones that can be listed, but for some by inode."""
    waiting = [folder]
    while waiting:
        root = waiting.pop()
        state = root.lstat()
        if state.st_mode & _LISTABLE != _LISTABLE and state.st_ino not in closed:
            root.chmod(0o700)
        waiting += _listed(root)[1]


def _listed(folder: Path) -> tuple[set[str], list[Path]]:
    """Return the names in a folder, and the folders in it that are no `.git`."""
    try:
        with os.scandir(folder) as entries:
            listed = [(one.name, one.is_dir(follow_symlinks=False)) for one in entries]
    except OSError:
        return set(), []  # Closed to its owner, or beyond the longest path.
    folders = [folder / name for name, is_folder in listed if is_folder and name.lower() != ".git"]
    return {name for name, _ in listed}, [one for one in folders if len(bytes(one)) < _PATH_BYTES]


@contextlib.asynccontextmanager
async def open_checkout(folder: Path, say: Callable[[str], None]) -> AsyncGenerator[GuestSandbox]:
    """Yield a sandbox over a folder; what the model planted there is gone afterwards."""
    backend = CheckoutBackend(folder)
    sandbox = await backend.start(timeout_s=30.0)
    try:
        yield sandbox
    finally:
        await sandbox.close()
        for path in backend.remove_planted():
            say(f"removed {path}: the model made a git repository, which could run programs")
