"""Commit-based tasks: the tree before a fix, graded by the tests that came with the fix.

A commit qualifies if it changes tests and other Python files, and few lines. The agent gets the
parent's files. The hidden tests are the commit's, run by `unittest` in a process apart from the
code under test (`envs/tasks/apart`), one line per test. Tests that pass after the fix are kept;
tests that need more from the code than plain values do not pass there. Later history never enters a
machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from penstock.envs.factory.drafting import LIMITS, commit_instruction
from penstock.envs.factory.lab import MachineLab
from penstock.envs.factory.plans import TaskPlan
from penstock.envs.factory.repository import GitRepository
from penstock.envs.tasks.apart.programs import modules_peer, suite_argv, suite_files
from penstock.envs.tasks.source import Rejection, TaskCandidate, TaskOrigin, TaskRejectedError
from penstock.messages.task import HiddenTests, Split, Task

CHANGED_LINES_MAX = 400
FILES_MAX = 300
FILES_BYTES_MAX = 384 << 10
_TEXT_SUFFIXES = {".py", ".toml", ".cfg", ".ini", ".txt", ".md", ".rst", ".json"}


@dataclass(frozen=True)
class Commit:
    """One commit that may become a task."""

    digest: str
    subject: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    num_lines: int


def read_commit(repository: GitRepository, digest: str) -> Commit | None:
    """Return a commit if it qualifies: one parent, tests and sources changed, few lines."""
    shown = repository.git("show", "--no-renames", "--numstat", "--format=%s%n%P", digest)
    subject, parents, *rows = shown.splitlines()
    if len(parents.split()) != 1:
        return None
    changes = [row.split("\t") for row in rows if row.count("\t") == 2]
    paths = [path for _, _, path in changes if path.endswith(".py")]
    num_lines = sum(int(n) for added, gone, _ in changes for n in (added, gone) if n.isdigit())
    existing = [path for path in paths if repository.git("ls-tree", digest, "--", path)]
    tests = tuple(path for path in existing if is_test(path))
    sources = tuple(path for path in existing if not is_test(path))
    # Deleted files make the numbers differ: a task cannot ask for a deletion by its tests.
    if not tests or not sources or num_lines > CHANGED_LINES_MAX or len(existing) != len(paths):
        return None
    return Commit(digest, subject, sources, tests, num_lines)


def is_test(path: str) -> bool:
    """Return whether a path is a test by its name or folder."""
    pure = PurePosixPath(path)
    return pure.name.startswith("test") or pure.stem.endswith("_test") or "tests" in pure.parts


def read_tree(repository: GitRepository, commit: str) -> dict[str, str]:
    """Return the text files of a commit.

    Raises:
        TaskRejectedError: The files are too many or too large.

    """
    names = repository.git("ls-tree", "-r", "--name-only", "-z", commit).split("\0")
    texts = [name for name in names if PurePosixPath(name).suffix in _TEXT_SUFFIXES]
    if len(texts) > FILES_MAX:
        raise TaskRejectedError(Rejection.TOO_LARGE, f"{commit}: {len(texts)} files")
    files = {name: show(repository, commit, name) for name in texts}
    if sum(map(len, files.values())) > FILES_BYTES_MAX:
        raise TaskRejectedError(Rejection.TOO_LARGE, f"{commit}: over {FILES_BYTES_MAX} bytes")
    return files


def show(repository: GitRepository, commit: str, path: str) -> str:
    """Return one file of a commit."""
    return repository.git("show", f"{commit}:{path}")


COMMITS_MAX = 2_000
_PASSED = " passed"


class CommitSource:
    """The history of one local repository, newest first."""

    name = "commits"

    def __init__(self, folder: Path) -> None:
        """Open the repository.

        Raises:
            NotFoundError: The folder is not a git repository.
            GitError: The repository cannot be read safely.

        """
        self._repository = GitRepository(folder)

    def plans(self) -> Iterator[TaskPlan]:
        """Yield a plan for each commit that qualifies."""
        for digest in self._repository.commits(COMMITS_MAX):
            commit = read_commit(self._repository, digest)
            if commit is not None:
                yield CommitPlan(self._repository, commit)


class CommitPlan:
    """One commit."""

    def __init__(self, repository: GitRepository, commit: Commit) -> None:
        self.name = f"{repository.folder.resolve().name}.{commit.digest[:12]}"
        self._repository, self._commit = repository, commit

    async def draft(self, lab: MachineLab) -> list[TaskCandidate]:
        """Run the commit's tests before and after the fix, and keep those that pass after it."""
        commit = self._commit
        before = read_tree(self._repository, f"{commit.digest}~1")
        tests = {path: show(self._repository, commit.digest, path) for path in commit.tests}
        gold = {path: show(self._repository, commit.digest, path) for path in commit.sources}
        files = {path: text for path, text in before.items() if path not in tests}
        draft = self._candidate(files, tests, gold, [], 0)
        async with lab.bench() as bench:
            passing_before = _passed(await bench.test(draft.task, draft.hidden, {}))
            passing = _passed(await bench.test(draft.task, draft.hidden, gold))
        turned = [name for name in passing if name not in passing_before]
        # Without a test that fails before, unchanged files would pass.
        if not turned:
            raise TaskRejectedError(Rejection.TESTS_UNCHANGED, self.name)
        return [self._candidate(files, tests, gold, passing, len(turned))]

    def _candidate(
        self,
        files: dict[str, str],
        tests: dict[str, str],
        gold: dict[str, str],
        passing: list[str],
        num_turned: int,
    ) -> TaskCandidate:
        commit = self._commit
        task = Task(
            task_id=self.name,
            category="commit",
            split=Split.TRAIN,
            instruction=commit_instruction(commit.subject, sorted(tests)),
            files=files,
            limits=LIMITS,
        )
        beside = {path: text for path, text in files.items() if is_test(path)} | tests
        code = [path for path in {**files, **gold} if path.endswith(".py") and path not in beside]
        modules = [path for path in tests if not path.endswith(("__init__.py", "conftest.py"))]
        hidden = HiddenTests(
            task_id=self.name,
            files=suite_files(beside, code, modules, passing),
            argv=suite_argv(),
            peer=modules_peer(),
            expected=[f"{name}{_PASSED}" for name in passing],
            gold_files=gold,
            timeout_s=60.0,
        )
        origin = TaskOrigin(
            source=CommitSource.name,
            repository=self._repository.folder.resolve().name,
            kind="commit",
            path=commit.sources[0],
            digest=commit.digest,
            change=commit.digest[:12],
            num_lines=commit.num_lines,
            num_files=len(files),
            num_cases_failed=num_turned,
            num_cases=len(passing),
            hint="symptom",
        )
        return TaskCandidate(task=task, hidden=hidden, origin=origin)


def _passed(lines: list[str] | None) -> list[str]:
    return sorted({line.removesuffix(_PASSED) for line in lines or [] if line.endswith(_PASSED)})
