"""How much of a change to a checkout is still there later, by git.

Three trees are written into a folder of their own, so neither the index nor the objects of the
checkout change: before the agent, after it, and later. The agent's change is the set of lines that
differ between the first two; those that still differ from the first in the third are kept.
"""

import asyncio
import os
from collections import Counter
from pathlib import Path

from penstock.messages.errors import PenstockError

GIT_S_MAX = 60.0
DIFF_BYTES_MAX = 16 << 20
Line = tuple[str, str]
"""File, and the line with its sign."""
_QUIET = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=on")
"""Nothing that a repository's settings name is run but its own filters."""


class KeptError(PenstockError, RuntimeError):
    """Git cannot say what changed; the text has its words."""


class Checkout:
    """One checkout under observation.

    Args:
        folder: the checkout's, inside a git repository.
        scratch: an empty folder for trees and an index.

    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._folder, self._scratch = folder, scratch

    async def snapshot(self) -> str:
        """Return a tree of all files that are not ignored, as they are now.

        Raises:
            KeptError: It is in no repository, or git fails.

        """
        await self._git("add", "--all", "--ignore-errors", ".")
        return (await self._git("write-tree")).decode().strip()

    async def kept(self, before: str, after: str, later: str) -> float | None:
        """Return the share of the lines changed by `after` that `later` still has; None: no change.

        Raises:
            KeptError: Git fails, or a difference is too large to compare.

        """
        changed = changed_lines(await self._diff(before, after))
        if not changed:
            return None
        still = changed & changed_lines(await self._diff(before, later))
        return still.total() / changed.total()

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
