"""Lints of Python files by pyflakes, which runs in the guest.

pyflakes is pure Python: on first use its files are written into the guest and run by the guest's
interpreter, so that the host never parses a file of the policy.
"""

from functools import cache
from importlib.metadata import files
from pathlib import Path

from penstock.envs.harness.tool_calls import InvalidCallError
from penstock.envs.sandbox import Sandbox
from penstock.messages.task import Limits

LINTS_DIR = "/tmp/.lints"  # noqa: S108 - in the guest
_RUN = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from pyflakes.api import main; "
    "main(prog='lint', args=sys.argv[1:])"
)


class Lints:
    """The linter of one session."""

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
