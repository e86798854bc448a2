"""A user's checkout in a sandbox: the model works on a copy, and its change is applied at the end.

While it works, nothing of its doing is where the user's own git or editor could run it. What git
would take for a repository is never applied.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path

from penstock.envs.microvm.machine import GuestSandbox
from penstock.envs.microvm.process import ProcessBackend
from penstock.envs.sandbox import WORK_DIR
from penstock.infra.output import print_line
from penstock.messages.errors import ConfigError, NotFoundError

ENTRIES_MAX, BYTES_MAX = 200_000, 4 << 30
"""Of a checkout without its repositories, which is copied."""
_LISTABLE = 0o500
_PATH_BYTES = 4000
"""Beyond it neither git nor anyone else opens a folder."""
_REMOVE_S_MAX = 60.0


class CheckoutBackend(ProcessBackend):
    """Starts sandboxes over a copy of a folder at `/work`, everything else read-only.

    The agent's programs run under bubblewrap with the guest agent of the microVMs as their first
    process, so paths, environment, limits and wording are those of training. There is no network.
    The isolation class is `process`: this is for a user's own code, not for hostile code. The
    folder's own repositories are mounted read-only into the copy.

    Args:
        folder: The user's.
        copy: Becomes the working directory, writable.
        cache: Folder with the guest agent.

    Raises:
        NotFoundError: It is not a folder, or itself a bare repository, or a link leads to one.
        BackendUnavailable: The guest agent or bubblewrap is missing.

    """

    def __init__(self, folder: Path, copy: Path, cache: Path | None = None) -> None:
        if not folder.is_dir():
            raise NotFoundError(f"{folder}: expected a folder")
        folder = folder.resolve()
        repositories = find_repositories(folder)
        if folder in repositories:
            raise NotFoundError(f"{folder}: expected a checkout, not a bare repository")
        for path in repositories:
            if path.is_symlink():
                raise NotFoundError(f"{path}: expected a repository's own folder, not a link")
        mounts = ["--bind", str(copy), WORK_DIR]
        for path in sorted(repositories):
            mounts += ["--ro-bind", str(path), f"{WORK_DIR}/{path.relative_to(folder)}"]
        super().__init__(cache, mounts=mounts)


def find_repositories(folder: Path) -> set[Path]:
    """Return what git would take for a repository below a folder, itself included.

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
    return set(found)


def _listed(folder: Path) -> tuple[set[str], list[Path]]:
    """Return the names in a folder, and the folders in it that are no `.git`."""
    try:
        with os.scandir(folder) as entries:
            listed = [(one.name, one.is_dir(follow_symlinks=False)) for one in entries]
    except OSError:
        return set(), []  # Closed to its owner, or beyond the longest path.
    folders = [folder / name for name, is_folder in listed if is_folder and name.lower() != ".git"]
    return {name for name, _ in listed}, [one for one in folders if len(bytes(one)) < _PATH_BYTES]


class CheckoutCopy:
    """A copy of a user's folder without its repositories, to bring back what changes in it.

    Raises:
        ConfigError: There is too much to copy.

    """

    def __init__(self, folder: Path, copy: Path) -> None:
        self._folder, self._copy = folder, copy = folder.resolve(), copy.resolve()
        self._repositories = {path.relative_to(folder) for path in find_repositories(folder)}
        self._theirs = self._scan(folder, self._repositories)
        num_bytes = sum(info.st_size for info in self._theirs.values())
        if len(self._theirs) > ENTRIES_MAX or num_bytes > BYTES_MAX:
            limits = f"{ENTRIES_MAX} files of {BYTES_MAX >> 30} GiB"
            raise ConfigError(f"{folder}: expected at most {limits}, which are copied")
        self._bring(self._theirs, folder, copy, print_line)
        self._ours = self._scan(copy, set())

    def apply(self, say: Callable[[str], None]) -> None:
        """Bring what changed in the copy into the user's folder."""
        self._scan(self._copy, set())  # Opens what is closed, or it would hide repositories.
        planted = {path.relative_to(self._copy) for path in find_repositories(self._copy)}
        for name in sorted(planted - self._repositories):
            say(f"left out {name}: the model made a git repository, which could run programs")
        left_out = planted | self._repositories
        now = self._scan(self._copy, left_out)
        changed = {name: info for name, info in now.items() if _differs(info, self._ours.get(name))}
        for name in sorted(self._ours.keys() - now.keys(), reverse=True):
            if not left_out & {name, *name.parents} and self._is_as_it_was(name, say):
                with contextlib.suppress(OSError):  # A folder that holds more, such as `.git`.
                    _take_away(_straight(self._folder / name))
        mine = {name: info for name, info in changed.items() if self._is_as_it_was(name, say)}
        self._bring(mine, self._copy, self._folder, say)

    def _is_as_it_was(self, name: Path, say: Callable[[str], None]) -> bool:
        """Return whether the user has left a path alone; say so where not."""
        theirs, before = self._folder / name, self._theirs.get(name)
        try:
            now = _straight(theirs).lstat()
            same = before is not None and not _differs(now, before)
        except OSError:
            same = before is None
        if not same:
            say(f"{name}: changed meanwhile: yours is kept")
        return same

    def _scan(self, folder: Path, without: set[Path]) -> dict[Path, os.stat_result]:
        """Return what is below a folder, parents first, without some names and all below them."""
        found: dict[Path, os.stat_result] = {}
        waiting = [folder]
        while waiting:
            root = waiting.pop()
            names, folders = _listed(root)
            for path in sorted(root / name for name in names):
                if (name := path.relative_to(folder)) in without:
                    continue
                with contextlib.suppress(OSError):  # It has gone.
                    found[name] = path.lstat()
                if path in folders:
                    waiting.append(path)
                    if folder == self._copy and found[name].st_mode & _LISTABLE != _LISTABLE:
                        path.chmod(0o700)
        return dict(sorted(found.items()))

    def _bring(
        self,
        names: Mapping[Path, os.stat_result],
        source: Path,
        target: Path,
        say: Callable[[str], None],
    ) -> None:
        for name, info in names.items():
            try:
                _put(source / name, _straight(target / name), info)
            except OSError as error:
                say(f"{name}: not copied: {error.strerror}")
        for name, info in reversed(list(names.items())):  # A folder is filled before it is closed.
            if stat.S_ISDIR(info.st_mode):
                with contextlib.suppress(OSError):
                    (target / name).chmod(stat.S_IMODE(info.st_mode))


def _differs(one: os.stat_result, other: os.stat_result | None) -> bool:
    """Return whether a file is another than before; no program can set a time of change."""
    if other is None or one.st_mode != other.st_mode:
        return True
    same = (one.st_ino, one.st_ctime_ns) == (other.st_ino, other.st_ctime_ns)
    return not same and not stat.S_ISDIR(one.st_mode)


def _put(source: Path, target: Path, info: os.stat_result) -> None:
    """Write a copy of a file, link or folder, in the place of whatever is there."""
    if stat.S_ISDIR(info.st_mode):
        if target.is_symlink() or not target.is_dir():
            _take_away(target)
            target.mkdir()
        return
    if target.is_dir() and not target.is_symlink():
        target.rmdir()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".penstock-") as scratch:
        new = Path(scratch) / "new"
        if stat.S_ISLNK(info.st_mode):
            new.symlink_to(source.readlink())
        elif stat.S_ISREG(info.st_mode):
            shutil.copy2(source, new, follow_symlinks=False)
        else:
            return  # Pipes, sockets and devices are nobody's work.
        new.replace(target)


def _straight(path: Path) -> Path:
    """Return a path that leads through no link.

    Raises:
        OSError: It does.

    """
    if os.path.realpath(path.parent) != str(path.parent):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return path


def _take_away(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def open_checkout(folder: Path, say: Callable[[str], None]) -> AsyncGenerator[GuestSandbox]:
    """Yield a sandbox over a copy of a folder; the change comes into the folder afterwards."""
    scratch = Path(tempfile.mkdtemp(prefix="penstock-agent-"))
    copy = scratch / "work"
    copy.mkdir()
    try:
        backend = CheckoutBackend(folder, copy)
        work = await asyncio.to_thread(CheckoutCopy, folder, copy)
        sandbox = await backend.start(timeout_s=30.0)
        try:
            yield sandbox
        finally:
            await sandbox.close()
            await asyncio.to_thread(work.apply, say)
    finally:
        # The model may have made folders that are too deep for `shutil.rmtree`.
        remove = ["rm", "-rf", "--", str(scratch)]
        await asyncio.to_thread(subprocess.run, remove, check=False, timeout=_REMOVE_S_MAX)
