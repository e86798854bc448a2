"""The terminal: a command at a time, in a shell that remembers where it is and what is set.

There is no process that lives between commands. Each one begins with the working directory and the
exported variables that the last one left, kept in two files of the guest; so a command that hangs
or kills its shell loses nothing but itself.
"""

from penstock.envs.harness.result import InvalidCallError
from penstock.envs.sandbox import WORK_DIR, ExecResult, Sandbox, SandboxError
from penstock.messages.task import Limits

STATE_DIR = "/tmp/.terminal"  # noqa: S108 - in the guest
_STATE_BYTES_MAX = 64 << 10
_SCRIPT = """\
_t_state=$1 _t_command=$2 _t_start=$3 _t_bytes=$4; set --
if [ -r "$_t_state/env" ]; then . "$_t_state/env" 2>/dev/null; fi
if [ -r "$_t_state/cwd" ]; then cd "$(cat "$_t_state/cwd")" 2>/dev/null || cd "$_t_start"; fi
_t_leave() {
  _t_code=$?
  mkdir -p "$_t_state"
  pwd > "$_t_state/cwd.new" && mv -f "$_t_state/cwd.new" "$_t_state/cwd"
  export -p | head -c "$_t_bytes" > "$_t_state/env.new" && mv -f "$_t_state/env.new" "$_t_state/env"
  exit $_t_code
}
trap _t_leave EXIT
eval "$_t_command"
"""
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

    async def directory(self) -> str:
        """Return where the next command begins."""
        try:
            data = await self._sandbox.read_file(f"{STATE_DIR}/cwd", _STATE_BYTES_MAX)
        except SandboxError:
            return WORK_DIR
        return data.decode("utf-8", "replace").strip() or WORK_DIR

    async def _exec(self, command: str) -> ExecResult:
        if not command.strip():
            raise InvalidCallError("command is empty")
        arguments = [STATE_DIR, command, WORK_DIR, str(_STATE_BYTES_MAX)]
        return await self._sandbox.exec(
            ["bash", "-c", _SCRIPT, "terminal", *arguments],
            timeout_s=self._limits.tool_s_max,
            env=LOCALE,
            output_bytes_max=self._limits.output_bytes_max,
        )
