"""The specification of a tool, and the toolbox that tools share in one machine."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import files
from pathlib import Path
from typing import Any

from penstock.envs.harness.pages import Pages
from penstock.envs.harness.retrieval.index import CodeSearch, Embedder
from penstock.envs.harness.terminal import Jobs, Shell
from penstock.envs.harness.tool_calls import Argument, InvalidCallError
from penstock.envs.sandbox import Sandbox
from penstock.messages.task import Limits

LINTS_DIR = "/tmp/.lints"  # noqa: S108 - in the guest
_RUN = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from pyflakes.api import main; "
    "main(prog='lint', args=sys.argv[1:])"
)


class Lints:
    """pyflakes, run in the guest, for one session.

    It is pure Python: on first use its files are written into the guest and run by the guest's
    interpreter, so that the host never parses a file of the policy.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        self._sandbox, self._limits = sandbox, limits
        self._is_there = False

    async def read(self, path: str) -> str:
        """Return the lints of a file, or of a folder's Python files, one per line."""
        if not self._is_there:
            await self._sandbox.write_files(linter_files())
            self._is_there = True
        done = await self._sandbox.exec(
            ["python3", "-I", "-S", "-B", "-c", _RUN, LINTS_DIR, path],
            timeout_s=self._limits.tool_s_max,
            output_bytes_max=self._limits.output_bytes_max,
        )
        if done.timed_out:
            raise InvalidCallError("the linter took too long")
        output = (done.stdout + done.stderr).decode("utf-8", "replace")
        return output.strip().replace("./", "") or "no lints"


@cache
def linter_files() -> dict[str, bytes]:
    """Return pyflakes' modules by path in the guest."""
    sources = [file for file in files("pyflakes") or [] if file.suffix == ".py"]
    modules = [file for file in sources if "test" not in file.parts and "scripts" not in file.parts]
    return {f"{LINTS_DIR}/{file}": Path(str(file.locate())).read_bytes() for file in modules}


class Toolbox:
    """One machine with the task's limits, and the state that tools keep between calls."""

    def __init__(
        self, sandbox: Sandbox, limits: Limits, embedder: Embedder | None, pages: Pages
    ) -> None:
        self.pages = pages
        self.sandbox, self.limits = sandbox, limits
        self.shell = Shell(sandbox, limits)
        self.jobs = Jobs(sandbox, limits)
        self.lints = Lints(sandbox, limits)
        self.search = CodeSearch(sandbox, embedder)


@dataclass(frozen=True)
class ToolSpec:
    """A tool; `run` receives the value of every declared argument."""

    run: Callable[[Toolbox, dict[str, Any]], Awaitable[str]]
    description: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    is_read: bool = False
    """Whether it shows the text of the file at its `path`."""
    is_write: bool = False
    """Whether it changes the file at its `path`; such calls on one path run one after another."""
    is_terminal: bool = False
    """Whether it uses the terminal; such calls run one after another."""
