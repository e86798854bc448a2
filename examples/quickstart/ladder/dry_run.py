"""Runs the ladder's own code in this process, bounded, also as a sandbox without a machine.

Only for code that this package wrote: gates at generation and demonstrations. What a policy wrote
runs in a virtual machine and nowhere else. The sandbox holds files in memory and runs only
`python3 FILE` and `grep`, as either version of the harness calls them; its records are of backend
`dry_run`, which no trainer accepts.
"""

import builtins
import io
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from types import FrameType, SimpleNamespace
from typing import Any

from penstock.envs.sandbox import WORK_DIR, SandboxFileError
from penstock.envs.tasks.file_states import is_listing, plain_listing
from penstock.messages.rollout import SandboxRecord
from penstock.messages.sandbox import ExecResult

_LINES_MAX = 2_000
_CPU_S_MAX = 1.0
"""Reached only by numbers that grow without bound; of the thread's own processor time, so that a
starved machine fails no task."""


class LineLimitError(BaseException):
    """The code did not end within the bound."""


def call_bounded(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; stop it after `_LINES_MAX` executed lines.

    Raises:
        LineLimitError: the bound was reached.

    """
    executed = 0
    deadline_s = time.thread_time() + _CPU_S_MAX

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal executed
        executed += 1
        if executed > _LINES_MAX or time.thread_time() > deadline_s:
            raise LineLimitError(
                f"more than {_LINES_MAX} lines or {_CPU_S_MAX} s of processor time"
            )
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        return function(*arguments)
    finally:
        sys.settrace(outer)


def load(source: str, name: str) -> Callable[..., Any]:
    """Return one function of a source.

    Raises:
        SyntaxError: the source does not parse.
        KeyError: it defines no such name.

    """
    namespace: dict[str, Any] = {}
    exec(compile(source, "ladder", "exec"), namespace)  # noqa: S102 - our own templates
    function: Callable[..., Any] = namespace[name]
    return function


def outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, str]:
    """Run a function on a copy of the arguments.

    Returns:
        (True, repr of the result) or (False, the exception's class name).

    """
    copies = [list(a) if isinstance(a, list) else a for a in arguments]
    try:
        return True, repr(call_bounded(function, *copies))
    except (Exception, LineLimitError) as error:
        return False, type(error).__name__


def run_program(files: dict[str, str], path: str) -> tuple[int, str]:
    """Run one file of a repository that is held in memory, as `python3 PATH` would.

    Modules of the repository shadow installed ones; of these only `sys` is available.

    Returns:
        (exit code, standard output); a program past the line bound has exit code 124.

    """
    modules: dict[str, Any] = {"sys": SimpleNamespace(path=[])}

    def import_module(name: str, *_: Any) -> Any:
        if name not in modules:
            if f"{name}.py" not in files:
                raise ModuleNotFoundError(f"No module named {name!r}")
            namespace = {"__builtins__": scope}
            exec(compile(files[f"{name}.py"], name, "exec"), namespace)  # noqa: S102
            modules[name] = SimpleNamespace(**namespace)
        return modules[name]

    scope = vars(builtins) | {"__import__": import_module}
    output = io.StringIO()
    with redirect_stdout(output):
        code = _exit_code(files[path], {"__name__": "__main__", "__builtins__": scope})
    return code, output.getvalue()


def _exit_code(source: str, namespace: dict[str, Any]) -> int:
    try:
        call_bounded(exec, compile(source, "main", "exec"), namespace)
    except LineLimitError:
        return 124
    except SystemExit as error:
        return int(error.code or 0)
    except Exception:
        return 1
    return 0


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
        if is_listing(argv):
            own = {path: len(text) for path, text in self.files.items() if path[:1] != "/"}
            return ExecResult(exit_code=0, stdout=plain_listing(own))
        if argv[0] == "grep":
            return self._grep(argv[argv.index("-e") + 1], is_numbered="n" in argv[1])
        words = argv[-1].split()
        if words[0] != "python3" or words[-1] not in self.files:
            return ExecResult(exit_code=127, stderr=b"not available in a dry run")
        code, output = run_program(self.files, words[-1])
        return ExecResult(exit_code=code, stdout=output.encode()[:output_bytes_max])

    async def read_file(self, path: str, bytes_max: int) -> bytes:
        """Return a file's bytes."""
        if path not in self.files:
            raise SandboxFileError(f"no file {path}")
        return self.files[path].encode()[:bytes_max]

    async def write_files(self, files: Mapping[str, bytes], *, keeps_modes: bool = True) -> None:
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
