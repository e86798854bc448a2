"""The terminal of version 2: a shell with state, and background jobs by number.

No process lives between commands. The working directory and the exported variables are kept in a
file of the guest and restored for each command. So a command that hangs or kills its shell loses
only itself, and a copy of the machine includes the terminal.

A job is a process group in the guest, with a folder for its output, its exit code, its input pipe
and the number of bytes read. `terminal_io` reads the output since its last call. A copy of the
machine includes its jobs.
"""

import asyncio
import shlex

from penstock.envs.harness.tool_calls import InvalidCallError
from penstock.envs.sandbox import WORK_DIR, Sandbox, SandboxFileError
from penstock.messages.sandbox import ExecResult
from penstock.messages.task import Limits

STATE_DIR = "/tmp/.terminal"  # noqa: S108 - in the guest
RESTORE = f"""\
cd {WORK_DIR}
[ -r {STATE_DIR}/state ] && . {STATE_DIR}/state 2>/dev/null
"""
"""Bash that restores the state of the last command."""
_SCRIPT = f"""\
_t_command=$1; set --
{RESTORE}
_t_leave() {{
  _t_code=$?
  [ -d {STATE_DIR} ] || mkdir -p {STATE_DIR}
  {{ export -p; printf 'cd -- %q || cd {WORK_DIR}\\n' "$PWD"; }} > {STATE_DIR}/state.new &&
    mv -f {STATE_DIR}/state.new {STATE_DIR}/state
  exit $_t_code
}}
trap _t_leave EXIT
eval "$_t_command"
"""
"""The wrapper of each command. It starts few programs: each costs milliseconds in a machine."""
LOCALE = {"LC_ALL": "C"}
"""Locale of bash. An image may lack others, and a warning would become an observation."""


class Shell:
    """The terminal of one session."""

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        self._sandbox, self._limits = sandbox, limits

    async def run(self, command: str) -> str:
        """Run a command; a non-zero exit code follows the output."""
        done = await self._exec(command)
        output = (done.stdout + done.stderr).decode("utf-8", "replace").rstrip("\n")
        notes = []
        if done.truncated:
            notes.append("[output cut]")
        if done.timed_out:
            notes.append(f"[stopped after {self._limits.tool_s_max:g} s]")
        elif done.exit_code != 0:
            notes.append(f"[exit {done.exit_code}]")
        return "\n".join([*([output] if output else []), *notes]) or "[no output]"

    async def _exec(self, command: str) -> ExecResult:
        if not command.strip():
            raise InvalidCallError("command is empty")
        return await self._sandbox.exec(
            ["bash", "-c", _SCRIPT, "terminal", command],
            timeout_s=self._limits.tool_s_max,
            env=LOCALE,
            output_bytes_max=self._limits.output_bytes_max,
        )


JOBS_DIR = "/tmp/.jobs"  # noqa: S108 - in the guest
JOBS_MAX = 8
OUTPUT_BYTES_MAX = 1 << 20
"""Maximum output of a job; the `ulimit` of its files stops it beyond."""
_POLL_S = 0.05
_SETTLE_S = 0.2
"""Seconds that a job may continue writing, or end, before its output is returned."""
_TOO_MANY = 77
_START = f"""\
number=1
while [ -d {JOBS_DIR}/$number ]; do number=$((number + 1)); done
[ $number -le {JOBS_MAX} ] || exit {_TOO_MANY}
dir={JOBS_DIR}/$number; command=$1; set --
mkdir -p "$dir" && mkfifo "$dir/in" || exit 1
{RESTORE}
ulimit -f 1024
set -m
(
  exec 3<>"$dir/in"
  bash -c "$command" < "$dir/in" 3>&-
  echo $? > "$dir/code"
) > "$dir/out" 2>&1 &
echo $! > "$dir/pid"
echo $number
"""


class Jobs:
    """The background jobs of one machine."""

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        self._sandbox, self._limits = sandbox, limits
        self._reading = asyncio.Lock()

    async def start(self, command: str) -> str:
        """Start a command in the terminal's directory and return its number."""
        if not command.strip():
            raise InvalidCallError("command is empty")
        done = await self._sandbox.exec(
            ["bash", "-c", _START, "start", command],
            timeout_s=self._limits.tool_s_max,
            env=LOCALE,
        )
        if done.exit_code == _TOO_MANY:
            raise InvalidCallError(f"at most {JOBS_MAX} jobs in an episode")
        if done.exit_code != 0:
            raise InvalidCallError(done.stderr.decode("utf-8", "replace").strip() or "no start")
        return f"job {done.stdout.decode('utf-8', 'replace').strip()} started"

    async def speak(self, number: int, text: str, wait_s: int, *, stops: bool) -> str:
        """Write to a job, stop it if asked, wait for new output, and return it with its state."""
        folder = f"{JOBS_DIR}/{number}"
        if not await self._read(f"{folder}/pid", 16):
            raise InvalidCallError(f"no job {number}")
        if text:
            await self._sh(f"printf %s {shlex.quote(text)} > {folder}/in", "the job takes no input")
        if stops:
            await self._sh(f"kill -KILL -- -$(cat {folder}/pid) 2>/dev/null; true", "no stop")
        clock = asyncio.get_running_loop().time
        deadline, new = clock() + min(wait_s, self._limits.tool_s_max), ""
        while True:
            # The code before the output: a job that ends in between has all its output read.
            code = (await self._read(f"{folder}/code", 16)).decode("utf-8", "replace").strip()
            # New output shortens the wait: most programs print all they have within `_SETTLE_S`.
            if more := await self._new_output(folder):
                deadline = deadline if new else min(deadline, clock() + _SETTLE_S)
                new += more
            if code or stops or clock() >= deadline:
                break
            await asyncio.sleep(_POLL_S)
        state = "stopped" if stops else f"exit {code}" if code else "running"
        return "\n".join([*([new.rstrip("\n")] if new.strip("\n") else []), f"[{state}]"])

    async def _new_output(self, folder: str) -> str:
        # One reader at a time: two calls of a turn would both return the same output.
        async with self._reading:
            data = await self._read(f"{folder}/out", OUTPUT_BYTES_MAX)
            text = await self._read(f"{folder}/num_read", 16)
            num_read = int(text) if text.isdigit() else 0
            new = data[num_read:]
            if new:
                await self._sandbox.write_files({f"{folder}/num_read": b"%d" % len(data)})
        return new.decode("utf-8", "replace")

    async def _read(self, path: str, num_bytes_max: int) -> bytes:
        try:
            return await self._sandbox.read_file(path, num_bytes_max)
        except SandboxFileError:
            return b""

    async def _sh(self, script: str, problem: str) -> None:
        done = await self._sandbox.exec(["sh", "-c", script], timeout_s=2.0)
        if done.exit_code != 0 or done.timed_out:
            raise InvalidCallError(problem)
