"""The terminal of version 2: a shell with state, and background jobs by number.

No process lives between commands. Each command begins with the working directory and the exported
variables that the last one left, kept in a file of the guest; so a command that hangs or kills its
shell loses nothing but itself, and a copy of the machine has the terminal with it.

A job is a process group of its own in the guest, with a folder that holds its output, its exit
code, the pipe of its input and how much of its output was read. `terminal_io` reads what is new
since its last call. A copy of the machine has its jobs with it, too.
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
"""Bash that goes where the last command left off."""
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
"""Few programs are started: each costs milliseconds in a small machine."""
LOCALE = {"LC_ALL": "C"}
"""Locale of bash: an image need not hold another one, and a warning would be an observation."""


class Shell:
    """The terminal of one session."""

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        """Start in the working directory."""
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
"""A job that writes more is stopped by the size limit of its files."""
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
        """Start none."""
        self._sandbox, self._limits = sandbox, limits
        self._reading = asyncio.Lock()

    async def start(self, command: str) -> str:
        """Start a command where the terminal is, and return its number."""
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
        """Write to a job, stop it if asked, wait for new output, and return it with its state.

        Args:
            number: Returned by `start`.
            text: For its input; empty for none.
            wait_s: Longest wait for something new.
            stops: Whether to end it first.

        """
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
            code = (await self._read(f"{folder}/code", 16)).decode("utf-8", "replace").strip()
            if more := await self._new_output(folder):
                deadline = deadline if new else min(deadline, clock() + _SETTLE_S)
                new += more
            if code or stops or clock() >= deadline:
                break
            await asyncio.sleep(_POLL_S)
        state = "stopped" if stops else f"exit {code}" if code else "running"
        return "\n".join([*([new.rstrip("\n")] if new.strip("\n") else []), f"[{state}]"])

    async def _new_output(self, folder: str) -> str:
        """Return what the job wrote since this was asked last."""
        async with self._reading:
            data = await self._read(f"{folder}/out", OUTPUT_BYTES_MAX)
            text = await self._read(f"{folder}/num_read", 16)
            num_read = int(text) if text.isdigit() else 0
            new = data[num_read:]
            if new:
                await self._sandbox.write_files({f"{folder}/num_read": b"%d" % len(data)})
        return new.decode("utf-8", "replace")

    async def _read(self, path: str, num_bytes_max: int) -> bytes:
        """Return a file of the jobs' own; nothing where there is none."""
        try:
            return await self._sandbox.read_file(path, num_bytes_max)
        except SandboxFileError:
            return b""

    async def _sh(self, script: str, problem: str) -> None:
        done = await self._sandbox.exec(["sh", "-c", script], timeout_s=2.0)
        if done.exit_code != 0 or done.timed_out:
            raise InvalidCallError(problem)
