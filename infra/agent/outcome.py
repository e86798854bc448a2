"""What became of an agent's work: tests, what is kept of its change, and feedback with both.

How much of a change to a checkout is still there later, by git.

Three trees are written into a folder of their own, so neither the index nor the objects of the
checkout change: before the agent, after it, and later. The agent's change is the set of lines that
differ between the first two; those that still differ from the first in the third are kept. A mode,
a link or an empty folder that differs counts as a line.
"""

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from penstock.envs.sandbox import Sandbox
from penstock.infra.agent.loop import AgentReport, End
from penstock.infra.agent.model import Model
from penstock.infra.agent.states import changed_states, folder_states
from penstock.infra.agent.stream import AgentError
from penstock.messages.errors import PenstockError
from penstock.messages.task import FileState

GIT_S_MAX = 60.0
DIFF_BYTES_MAX = 16 << 20
Line = tuple[str, str]
"""File, and the line with its sign."""
_QUIET = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=on")
"""Nothing that a repository's settings name is run but its own filters."""


class KeptError(PenstockError, RuntimeError):
    """Git cannot say what changed; the text has its words."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a checkout at one time."""

    tree: str
    """Digest of git's tree of all files that are not ignored."""
    states: dict[bytes, FileState]
    """States of those files, and of empty folders."""


class Checkout:
    """One checkout under observation.

    Args:
        folder: the checkout's, inside a git repository.
        scratch: an empty folder for trees and an index.

    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._folder, self._scratch = folder, scratch

    async def snapshot(self) -> Snapshot:
        """Return all files that are not ignored, as they are now.

        Raises:
            KeptError: It is in no repository, or git fails.

        """
        await self._git("add", "--all", "--ignore-errors", ".")
        tree = (await self._git("write-tree")).decode().strip()
        states = await asyncio.to_thread(folder_states, self._folder)
        tracked = set((await self._git("ls-files", "-z")).split(b"\0"))
        empty = await self._git("ls-files", "-z", "--others", "--directory", "--exclude-standard")
        tracked |= {path.removesuffix(b"/") for path in empty.split(b"\0")}
        own = {path: one for path, one in states.items() if path in tracked}
        return Snapshot(tree=tree, states=own)

    async def kept(self, before: Snapshot, after: Snapshot, later: Snapshot) -> float | None:
        """Return the share of the lines changed by `after` that `later` still has; None: no change.

        Raises:
            KeptError: Git fails, or a difference is too large to compare.

        """
        changed = await self._changed(before, after)
        if not changed:
            return None
        still = changed & await self._changed(before, later)
        return still.total() / changed.total()

    async def _changed(self, before: Snapshot, after: Snapshot) -> Counter[Line]:
        lines = changed_lines(await self._diff(before.tree, after.tree))
        return lines + Counter(
            (one.shown, "state") for one in changed_states(before.states, after.states)
        )

    async def _diff(self, base: str, tree: str) -> bytes:
        options = ("--unified=0", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color")
        return await self._git("diff", *options, base, tree)

    async def _git(self, *arguments: str) -> bytes:
        own = await self._objects()
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
            "GIT_INDEX_FILE": str(self._scratch / "index"),
            "GIT_OBJECT_DIRECTORY": str(self._scratch / "objects"),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": own,
            "GIT_OPTIONAL_LOCKS": "0",
        }
        return await _run(self._folder, arguments, environment)

    async def _objects(self) -> str:
        (self._scratch / "objects").mkdir(exist_ok=True)
        arguments = ("rev-parse", "--path-format=absolute", "--git-path", "objects")
        return (await _run(self._folder, arguments, dict(os.environ))).decode().strip()


async def _run(folder: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> bytes:
    """Run git; return what it wrote.

    Raises:
        KeptError: It fails, takes too long, or writes too much.

    """
    try:
        process = await asyncio.create_subprocess_exec(
            *("git", *_QUIET, *arguments),
            cwd=folder,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=DIFF_BYTES_MAX,
        )
    except OSError as error:
        raise KeptError(f"git: {error}") from error
    assert process.stdout is not None
    data = bytearray()
    try:
        async with asyncio.timeout(GIT_S_MAX):
            while (piece := await process.stdout.read(65_536)) and len(data) <= DIFF_BYTES_MAX:
                data += piece
            if len(data) > DIFF_BYTES_MAX:
                raise KeptError(f"git {arguments[0]}: more than {DIFF_BYTES_MAX} bytes")
            code = await process.wait()
    except TimeoutError as error:
        raise KeptError(f"git {arguments[0]}: no end within {GIT_S_MAX:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code:
        raise KeptError(f"git {arguments[0]}: exit code {code}")
    return bytes(data)


def changed_lines(diff: bytes) -> Counter[Line]:
    """Return the lines that a `git diff --unified=0` adds and removes, by file."""
    found: Counter[Line] = Counter()
    file, is_in_hunk = "", False
    for line in diff.decode("utf-8", "surrogateescape").split("\n"):
        if line.startswith("diff --git "):
            file, is_in_hunk = line, False
        elif line.startswith("@@ "):
            is_in_hunk = True
        elif line.startswith("Binary files "):
            found[file, "binary"] += 1
        elif is_in_hunk and line.startswith(("+", "-")):
            found[file, line] += 1
    return found


EXIT_CODES = {End.FINISHED: 0, End.TURN_LIMIT: 1, End.ANSWERED: 3, End.FAILED: 4}
"""2 is the command line's own: a wrong option, no such run."""
TESTS_FAILED = 5
Say = Callable[[str], None]
Sleep = Callable[[float], Awaitable[None]]


def exit_code(report: AgentReport) -> int:
    """Return what the command's exit code says; how the work ended comes before its tests."""
    if report.end is End.FINISHED and report.tests_passed is False:
        return TESTS_FAILED
    return EXIT_CODES[report.end]


async def run_tests(sandbox: Sandbox, command: str, seconds_max: float) -> bool:
    """Run a shell command where the agent worked; return whether it succeeded."""
    done = await sandbox.exec(["sh", "-c", command], timeout_s=seconds_max)
    return done.exit_code == 0 and not done.timed_out


async def report_outcome(model: Model, report: AgentReport) -> None:
    """Report how the work ended, and its tests."""
    signals = {"agent_finished": float(report.end is End.FINISHED)}
    if report.tests_passed is not None:
        signals["tests_passed"] = float(report.tests_passed)
    await _send(model, report, signals)


@asynccontextmanager
async def watched(folder: Path, say: Say) -> AsyncGenerator["Watch"]:
    """Observe a checkout's files from now on."""
    with tempfile.TemporaryDirectory(prefix="penstock-agent-") as scratch:
        yield await Watch.start(Checkout(folder, Path(scratch)), say)


class Watch:
    """The checkout's files before and after the agent, and how much of its change is kept."""

    def __init__(self, checkout: Checkout, before: Snapshot | None, say: Say) -> None:
        self._checkout, self._before, self._say = checkout, before, say
        self._after: Snapshot | None = None

    @classmethod
    async def start(cls, checkout: Checkout, say: Say) -> "Watch":
        """Remember the files before the agent."""
        try:
            return cls(checkout, await checkout.snapshot(), say)
        except KeptError as error:
            say(f"what is kept is not measured: {error}")
            return cls(checkout, None, say)

    async def agent_done(self) -> None:
        """Remember the files that the agent left."""
        try:
            self._after = await self._checkout.snapshot() if self._before else None
        except KeptError as error:
            self._say(f"what is kept is not measured: {error}")

    async def report_kept(
        self, model: Model, report: AgentReport, minutes: float, sleep: Sleep = asyncio.sleep
    ) -> None:
        """Wait, measure, and report."""
        if self._before is None or self._after is None:
            return
        self._say(f"in {minutes:g} minutes: how much of the change is kept (Ctrl-C: no matter)")
        await sleep(minutes * 60.0)
        try:
            later = await self._checkout.snapshot()
            report.diff_kept = await self._checkout.kept(self._before, self._after, later)
        except KeptError as error:
            self._say(f"what is kept is not measured: {error}")
        if report.diff_kept is not None:
            await _send(model, report, {"diff_kept": report.diff_kept})


async def _send(model: Model, report: AgentReport, signals: dict[str, float]) -> None:
    """Send signals; a refusal is in the report, and changes nothing else."""
    for name, value in signals.items():
        try:
            await model.give_feedback(name, value)
        except AgentError as error:
            report.feedback_refused = str(error)
        else:
            report.feedback[name] = value
