"""Tools that run a program, and the tool that ends the episode."""

from penstock.envs.harness.result import InvalidCallError
from penstock.envs.sandbox import Sandbox
from penstock.messages.task import Limits

_COMMAND_CHARACTERS_MAX = 2_000


async def run_terminal(sandbox: Sandbox, arguments: dict[str, str], limits: Limits) -> str:
    """Run a shell command in the working directory; tell a non-zero exit code after the output."""
    command = arguments["command"]
    if not command.strip() or len(command) > _COMMAND_CHARACTERS_MAX or "\0" in command:
        raise InvalidCallError(f"command must be 1 to {_COMMAND_CHARACTERS_MAX} characters")
    done = await sandbox.exec(
        ["sh", "-c", command],
        timeout_s=limits.tool_s_max,
        output_bytes_max=limits.output_bytes_max,
    )
    output = (done.stdout + done.stderr).decode("utf-8", "replace").rstrip("\n")
    if done.timed_out:
        return f"{output}\n[stopped after {limits.tool_s_max:g} s]".lstrip("\n")
    if done.exit_code != 0:
        return f"{output}\n[exit {done.exit_code}]".lstrip("\n")
    return output or "[no output]"


async def finish(sandbox: Sandbox, arguments: dict[str, str], limits: Limits) -> str:
    """Say that the work is done."""
    return "done"
