"""Background jobs of the terminal: started, read, fed and stopped by number.

A job is a process group of its own in the guest, with a folder that holds its output, its exit code
and the pipe of its input. `terminal_io` reads what is new since it was asked last.
"""

import asyncio
import shlex

from penstock.envs.harness.result import InvalidCallError
from penstock.envs.harness.shell import LOCALE
from penstock.envs.sandbox import Sandbox, SandboxFileError
from penstock.messages.task import Limits

JOBS_DIR = "/tmp/.jobs"  # noqa: S108 - in the guest
JOBS_MAX = 8
OUTPUT_BYTES_MAX = 1 << 20
"""A job that writes more is stopped by the size limit of its files."""
_POLL_S = 0.05
_START = """\
dir=$1/$2; mkdir -p "$dir" && mkfifo "$dir/in" && cd "$3" || exit 1
[ -r /tmp/.terminal/env ] && . /tmp/.terminal/env 2>/dev/null
ulimit -f 1024
set -m
( exec 3<>"$dir/in"; bash -c "$4" < "$dir/in" 3>&-; echo $? > "$dir/code" ) > "$dir/out" 2>&1 &
echo $! > "$dir/pid"
"""


class Jobs:
    """The background jobs of one session."""

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        """No job runs yet."""
        self._sandbox, self._limits = sandbox, limits
        self._offsets: dict[int, int] = {}

    async def start(self, command: str, directory: str) -> str:
        """Start a command and say its number."""
        if not command.strip():
            raise InvalidCallError("command is empty")
        if len(self._offsets) >= JOBS_MAX:
            raise InvalidCallError(f"at most {JOBS_MAX} jobs in an episode")
        number = len(self._offsets) + 1
        self._offsets[number] = 0
        done = await self._sandbox.exec(
            ["bash", "-c", _START, "start", JOBS_DIR, str(number), directory, command],
            timeout_s=self._limits.tool_s_max,
            env=LOCALE,
        )
        if done.exit_code != 0:
            raise InvalidCallError(done.stderr.decode("utf-8", "replace").strip() or "no start")
        return f"job {number} started"

    async def speak(self, number: int, text: str, wait_s: int, *, stops: bool) -> str:
        """Write to a job, stop it if asked, wait for new output, and return it with its state.

        Args:
            number: As `start` said it.
            text: For its input; empty for none.
            wait_s: Longest wait for something new.
            stops: Whether to end it first.

        """
        if number not in self._offsets:
            raise InvalidCallError(f"no job {number}")
        folder = f"{JOBS_DIR}/{number}"
        if text:
            await self._sh(f"printf %s {shlex.quote(text)} > {folder}/in", "the job takes no input")
        if stops:
            await self._sh(f"kill -KILL -- -$(cat {folder}/pid) 2>/dev/null; true", "no stop")
        deadline = asyncio.get_running_loop().time() + min(wait_s, self._limits.tool_s_max)
        while True:
            new, code = await self._new_output(number), await self._exit_code(folder)
            is_late = asyncio.get_running_loop().time() >= deadline
            if new or code is not None or stops or is_late:
                break
            await asyncio.sleep(_POLL_S)
        state = "stopped" if stops else "running" if code is None else f"exit {code}"
        return "\n".join([*([new.rstrip("\n")] if new.strip("\n") else []), f"[{state}]"])

    async def _new_output(self, number: int) -> str:
        try:
            data = await self._sandbox.read_file(f"{JOBS_DIR}/{number}/out", OUTPUT_BYTES_MAX)
        except SandboxFileError:
            return ""
        new = data[self._offsets[number] :]
        self._offsets[number] = len(data)
        return new.decode("utf-8", "replace")

    async def _exit_code(self, folder: str) -> str | None:
        try:
            return (await self._sandbox.read_file(f"{folder}/code", 16)).decode().strip() or None
        except SandboxFileError:
            return None

    async def _sh(self, script: str, problem: str) -> None:
        done = await self._sandbox.exec(["sh", "-c", script], timeout_s=2.0)
        if done.exit_code != 0 or done.timed_out:
            raise InvalidCallError(problem)
