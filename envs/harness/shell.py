"""The terminal: a command at a time, in a shell that remembers where it is and what is set.

There is no process that lives between commands. Each one begins with the working directory and the
exported variables that the last one left, kept in a file of the guest; so a command that hangs or
kills its shell loses nothing but itself, and a copy of the machine has the terminal with it.
"""

from penstock.envs.harness.result import InvalidCallError
from penstock.envs.sandbox import WORK_DIR, Sandbox
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
"""Of bash itself: an image need not hold another one, and a warning would be an observation."""


class Shell:
    """The terminal of one session."""

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        """Start in the working directory."""
        self._sandbox, self._limits = sandbox, limits

    async def run(self, command: str) -> str:
        """Run a command; a non-zero exit code is told after the output."""
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
