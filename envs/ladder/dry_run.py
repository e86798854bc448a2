"""A sandbox without a machine, for demonstrations of the ladder's own tasks.

It holds files in memory and runs only `python3 FILE` and `grep`, as either version of the harness
asks for them, on code that this project wrote, in this process. Its records are of backend
`dry_run`, which no trainer accepts.
"""

import re
from collections.abc import Mapping, Sequence

from penstock.envs.ladder.execute import run_program
from penstock.envs.sandbox import WORK_DIR, SandboxFileError
from penstock.messages.rollout import SandboxRecord
from penstock.messages.sandbox import ExecResult

_RECORD = SandboxRecord(
    backend="dry_run", isolation_class="none", kernel_digest="", image_digest=""
)


class DryRunSandbox:
    """Implements as much of `Sandbox` as demonstrations need."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """Hold a copy of a task's files."""
        self.info = _RECORD
        self.files = dict(files)

    async def exec(  # noqa: PLR0913 - the protocol's
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = WORK_DIR,
        env: Mapping[str, str] | None = None,
        output_bytes_max: int = 65536,
        op_key: str = "",
    ) -> ExecResult:
        """Run `grep` as the harness calls it, or `python3 FILE` in its terminal."""
        if argv[0] == "grep":
            return self._grep(argv[argv.index("-e") + 1], is_numbered="n" in argv[1])
        words = argv[-1].split()
        if words[0] != "python3" or words[-1] not in self.files:
            return ExecResult(exit_code=127, stderr=b"not to be had in a dry run")
        code, output = run_program(self.files, words[-1])
        return ExecResult(exit_code=code, stdout=output.encode()[:output_bytes_max])

    async def read_file(self, path: str, bytes_max: int) -> bytes:
        """Return a file's bytes."""
        if path not in self.files:
            raise SandboxFileError(f"no file {path}")
        return self.files[path].encode()[:bytes_max]

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write files."""
        self.files |= {path: data.decode() for path, data in files.items()}

    async def list_files(self, root: str) -> list[str]:
        """Return the paths of the working directory, sorted."""
        return sorted(path for path in self.files if not path.startswith("/"))

    async def close(self) -> None:
        """Forget the files."""
        self.files.clear()

    def _grep(self, pattern: str, *, is_numbered: bool) -> ExecResult:
        found = [
            f"./{path}:{number}:{line}" if is_numbered else f"./{path}:{line}"
            for path, text in self.files.items()
            for number, line in enumerate(text.splitlines(), 1)
            if re.search(pattern, line)
        ]
        output = "".join(f"{line}\n" for line in found).encode()
        return ExecResult(exit_code=0 if found else 1, stdout=output)
