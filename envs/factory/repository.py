"""Reads an untrusted git repository without running any program that it names.

Its `config`, hooks and attributes may name programs (`core.fsmonitor`, `diff.external`, text
conversions) that git runs. So git never sees them: a temporary bare repository with an empty
configuration borrows the objects, and git reads it under bubblewrap, with those objects read-only,
no network and nothing else of the host.
"""

import os
import re
import stat
import subprocess
import tempfile
from pathlib import Path

from penstock.envs.microvm.images.assets import find_bubblewrap
from penstock.messages.errors import NotFoundError, PenstockError

GIT_S_MAX = 60.0
OUTPUT_BYTES_MAX = 32 << 20
"""Maximum output of one command: a few kilobytes of objects may inflate to gigabytes."""
MEMORY_BYTES_MAX = 2 << 30
_REF_BYTES_MAX = 16 << 20
_DIGEST = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_REF = re.compile(r"refs/[A-Za-z0-9._/-]{1,200}")
_HEAD_OF = {
    40: "[core]\n\trepositoryformatversion = 0\n\tbare = true\n",
    64: "[core]\n\trepositoryformatversion = 1\n\tbare = true\n"
    "[extensions]\n\tobjectFormat = sha256\n",
}
"""Configuration by length of the digests (SHA-1 or SHA-256)."""


class GitError(PenstockError, RuntimeError):
    """Git failed, or the repository cannot be read safely."""


class GitRepository:
    """Commits and files of the checkout at `folder` that its HEAD reaches.

    Raises:
        NotFoundError: The folder is not a git repository.
        GitError: `.git` is not a plain folder with objects and a HEAD.
        BackendUnavailable: Bubblewrap is missing.

    """

    def __init__(self, folder: Path) -> None:
        git_folder = folder / ".git"
        if not git_folder.exists():
            raise NotFoundError(f"{folder}: expected a git repository")
        self.folder = folder
        self._objects = git_folder / "objects"
        for path in (git_folder, self._objects):
            if path.is_symlink() or not path.is_dir():
                raise GitError(f"{path}: expected a folder of this checkout (no link, no worktree)")
        self._head = _resolve_head(git_folder)
        self._shallow = _read_shallow(git_folder)
        self._bubblewrap = find_bubblewrap()

    def commits(self, num_max: int) -> list[str]:
        """Return the digests of the newest non-merge commits, newest first."""
        return self.git("log", "--no-merges", f"-n{num_max}", "--format=%H", "HEAD").split()

    def git(self, *arguments: str) -> str:
        """Run git and return its output as text.

        Raises:
            GitError: Git failed, exceeded `GIT_S_MAX`, or wrote more than `OUTPUT_BYTES_MAX`.

        """
        # A new repository per command, so that no state of one reaches the next.
        with tempfile.TemporaryDirectory(prefix="penstock-git-") as name:
            bare = Path(name)
            self._lay_out(bare)
            command = [*self._prefix(bare), "git", "--no-pager", "-c", "core.quotepath=off"]
            code, out, errors = _run([*command, *arguments])
        if code != 0:
            what = f"git {arguments[0]} in {self.folder}"
            if len(out) >= OUTPUT_BYTES_MAX:
                raise GitError(f"{what}: wrote over {OUTPUT_BYTES_MAX} bytes")
            raise GitError(f"{what}: {errors.decode(errors='replace').strip()[:500]}")
        return out.decode("utf-8", "replace")

    def _lay_out(self, bare: Path) -> None:
        for part in ("objects/info", "refs"):
            (bare / part).mkdir(parents=True)
        (bare / "HEAD").write_text(f"{self._head}\n")
        (bare / "config").write_text(_HEAD_OF[len(self._head)])
        (bare / "objects/info/alternates").write_text("/objects\n")
        if self._shallow:
            (bare / "shallow").write_text(self._shallow)

    def _prefix(self, bare: Path) -> list[str]:
        return [
            *("prlimit", f"--as={MEMORY_BYTES_MAX}", f"--cpu={int(GIT_S_MAX)}", "--core=0"),
            f"--fsize={OUTPUT_BYTES_MAX}",
            self._bubblewrap,
            *("--unshare-all", "--die-with-parent", "--new-session", "--clearenv"),
            *("--cap-drop", "ALL", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
            *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
            *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
            *("--proc", "/proc", "--dev", "/dev"),
            *("--ro-bind", str(bare), "/repository"),
            *("--ro-bind", str(self._objects.resolve()), "/objects"),
            *("--setenv", "PATH", "/usr/bin:/usr/local/bin", "--setenv", "HOME", "/repository"),
            *("--setenv", "GIT_DIR", "/repository", "--setenv", "GIT_CONFIG_NOSYSTEM", "1"),
            *("--setenv", "GIT_CONFIG_GLOBAL", "/dev/null", "--setenv", "GIT_ATTR_NOSYSTEM", "1"),
            *("--setenv", "GIT_NO_LAZY_FETCH", "1", "--chdir", "/repository", "--"),
        ]


def _run(command: list[str]) -> tuple[int, bytes, bytes]:
    """Return exit code, output and the beginning of the error output."""
    # Into files, whose size `prlimit` bounds; pipes would fill this process's memory.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                timeout=GIT_S_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise GitError(f"git: no end within {GIT_S_MAX:.0f} s") from error
        out.seek(0)
        errors.seek(0)
        return done.returncode, out.read(), errors.read(4096)


def _resolve_head(git_folder: Path) -> str:
    head = _read_text(git_folder / "HEAD").strip()
    name = head.removeprefix("ref: ")
    if name != head:
        if not _REF.fullmatch(name) or ".." in name:
            raise GitError(f"{git_folder / 'HEAD'}: expected a branch or a digest")
        head = _read_ref(git_folder, name)
    if not _DIGEST.fullmatch(head):
        raise GitError(f"{git_folder}: HEAD names no commit")
    return head


def _read_ref(git_folder: Path, name: str) -> str:
    if (git_folder / name).is_file():
        return _read_text(git_folder / name).strip()
    packed = git_folder / "packed-refs"
    rows = _read_text(packed).splitlines() if packed.is_file() else []
    return next((row.split(" ", 1)[0] for row in rows if row.endswith(f" {name}")), "")


def _read_shallow(git_folder: Path) -> str:
    """Return the commits at which a shallow clone's history ends."""
    path = git_folder / "shallow"
    if not path.is_file():
        return ""
    rows = _read_text(path).split()
    if not all(_DIGEST.fullmatch(row) for row in rows):
        raise GitError(f"{path}: expected one digest per line")
    return "".join(f"{row}\n" for row in rows)


def _read_text(path: Path) -> str:
    # The path may be anything: a link out of the repository, a pipe that never ends, gigabytes.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise GitError(f"{path}: expected a file")
            data = file.read(_REF_BYTES_MAX + 1)
    except OSError as error:
        raise GitError(f"{path}: {error.strerror}") from error
    if len(data) > _REF_BYTES_MAX:
        raise GitError(f"{path}: over {_REF_BYTES_MAX} bytes")
    return data.decode("utf-8", "replace")
