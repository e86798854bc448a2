"""Reads a local git repository: commits that may become tasks, and files of a commit."""

import subprocess
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from penstock.envs.tasks.source import Rejection, TaskRejectedError
from penstock.messages.errors import PenstockError

CHANGED_LINES_MAX = 400
FILES_MAX = 300
FILES_BYTES_MAX = 384 << 10
GIT_S_MAX = 60.0
_TEXT_SUFFIXES = {".py", ".toml", ".cfg", ".ini", ".txt", ".md", ".rst", ".json"}


class GitError(PenstockError, RuntimeError):
    """Git refused; the text has its words."""


@dataclass(frozen=True)
class Commit:
    """One commit that may become a task."""

    digest: str
    subject: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    num_lines: int


def read_commit(folder: Path, digest: str) -> Commit | None:
    """Return a commit if it has one parent, changes tests and sources, and few lines."""
    shown = git(folder, "show", "--no-renames", "--numstat", "--format=%s%n%P", digest)
    subject, parents, *rows = shown.splitlines()
    if len(parents.split()) != 1:
        return None
    changes = [row.split("\t") for row in rows if row.count("\t") == 2]
    paths = [path for _, _, path in changes if path.endswith(".py")]
    num_lines = sum(int(n) for added, gone, _ in changes for n in (added, gone) if n.isdigit())
    existing = [path for path in paths if _exists(folder, digest, path)]
    tests = tuple(path for path in existing if is_test(path))
    sources = tuple(path for path in existing if not is_test(path))
    if not tests or not sources or num_lines > CHANGED_LINES_MAX or len(existing) != len(paths):
        return None
    return Commit(digest, subject, sources, tests, num_lines)


def is_test(path: str) -> bool:
    """Return whether a path is of a test by its name or folder."""
    pure = PurePosixPath(path)
    return pure.name.startswith("test") or pure.stem.endswith("_test") or "tests" in pure.parts


def read_tree(folder: Path, commit: str) -> dict[str, str]:
    """Return the text files of a commit.

    Raises:
        TaskRejectedError: They are too many or too large.

    """
    names = git(folder, "ls-tree", "-r", "--name-only", "-z", commit).split("\0")
    wanted = [name for name in names if PurePosixPath(name).suffix in _TEXT_SUFFIXES]
    if len(wanted) > FILES_MAX:
        raise TaskRejectedError(Rejection.TOO_LARGE, f"{commit}: {len(wanted)} files")
    files = {name: show(folder, commit, name) for name in wanted}
    if sum(map(len, files.values())) > FILES_BYTES_MAX:
        raise TaskRejectedError(Rejection.TOO_LARGE, f"{commit}: over {FILES_BYTES_MAX} bytes")
    return files


def _exists(folder: Path, commit: str, path: str) -> bool:
    return bool(git(folder, "ls-tree", commit, "--", path))


def show(folder: Path, commit: str, path: str) -> str:
    """Return one file of a commit."""
    return git(folder, "show", f"{commit}:{path}")


def git(folder: Path, *arguments: str) -> str:
    """Run git without the user's configuration, hooks or pager.

    Raises:
        GitError: It failed.

    """
    command = ["git", "-C", str(folder), "-c", "core.quotepath=off", "--no-pager", *arguments]
    done = subprocess.run(command, capture_output=True, timeout=GIT_S_MAX, check=False)
    if done.returncode != 0:
        raise GitError(f"git {arguments[0]} in {folder}: {done.stderr.decode(errors='replace')}")
    return done.stdout.decode("utf-8", "replace")
