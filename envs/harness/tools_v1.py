"""The tools of version 1: few, and every argument a text. They never change."""

from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from penstock.envs.harness import files
from penstock.envs.harness.tool_calls import InvalidCallError, RawText, checked_path
from penstock.envs.harness.toolbox import Toolbox, ToolSpec
from penstock.envs.sandbox import WORK_DIR

_PATTERN_CHARACTERS_MAX = 256
_COMMAND_CHARACTERS_MAX = 2_000
_NO_MATCH = 1


async def _list_dir(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    """List a directory's files and directories, one per line; directories end in a slash."""
    base = PurePosixPath(checked_path(arguments["path"]))
    inside = [
        PurePosixPath(path).relative_to(base)
        for path in await toolbox.sandbox.list_files(WORK_DIR)
        if PurePosixPath(path).is_relative_to(base)
    ]
    names = {f"{path.parts[0]}/" if len(path.parts) > 1 else str(path) for path in inside}
    if not names:
        raise InvalidCallError(f"no directory {base}")
    return "\n".join(sorted(names))


async def _glob(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    """List the files whose path matches a shell pattern; `*` crosses slashes."""
    pattern = _checked_pattern(arguments["pattern"])
    found = [
        path for path in await toolbox.sandbox.list_files(WORK_DIR) if fnmatchcase(path, pattern)
    ]
    return "\n".join(found) or "no match"


async def _grep(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    """Search lines by an extended regular expression, below an optional path.

    The search runs in the machine, so that a costly pattern costs no other episode.
    """
    pattern = _checked_pattern(arguments["pattern"])
    path = checked_path(arguments["path"])
    done = await toolbox.sandbox.exec(
        ["grep", "-rIE", "-e", pattern, "--", path],
        timeout_s=toolbox.limits.tool_s_max,
        output_bytes_max=toolbox.limits.output_bytes_max,
    )
    if done.timed_out:
        raise InvalidCallError("the search took too long")
    if done.exit_code > _NO_MATCH:
        raise InvalidCallError(done.stderr.decode("utf-8", "replace").strip() or "grep failed")
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    return "\n".join(sorted(line.removeprefix("./") for line in lines)) or "no match"


def _checked_pattern(pattern: str) -> str:
    if not pattern or len(pattern) > _PATTERN_CHARACTERS_MAX or not pattern.isprintable():
        most = _PATTERN_CHARACTERS_MAX
        raise InvalidCallError(f"pattern must be 1 to {most} printable characters")
    return pattern


async def _run_terminal(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    """Run a shell command in the working directory; a non-zero exit code follows the output."""
    command = arguments["command"]
    if not command.strip() or len(command) > _COMMAND_CHARACTERS_MAX or "\0" in command:
        raise InvalidCallError(f"command must be 1 to {_COMMAND_CHARACTERS_MAX} characters")
    done = await toolbox.sandbox.exec(
        ["sh", "-c", command],
        timeout_s=toolbox.limits.tool_s_max,
        output_bytes_max=toolbox.limits.output_bytes_max,
    )
    output = (done.stdout + done.stderr).decode("utf-8", "replace").rstrip("\n")
    if done.timed_out:
        return f"{output}\n[stopped after {toolbox.limits.tool_s_max:g} s]".lstrip("\n")
    if done.exit_code != 0:
        return f"{output}\n[exit {done.exit_code}]".lstrip("\n")
    return output or "[no output]"


async def _finish(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    """Say that the work is done."""
    return "done"


_PATH = {"path": RawText()}
TOOLS_1: dict[str, ToolSpec] = {
    "list_dir": ToolSpec(_list_dir, "list a directory", {"path": RawText(default=".")}),
    "read_file": ToolSpec(files.read_file, "read a text file", _PATH, is_read=True),
    "write_file": ToolSpec(
        files.write_file, "write a whole file", _PATH | {"content": RawText()}, is_write=True
    ),
    "edit_file": ToolSpec(
        files.edit_file,
        "replace old, which must be there once, by new",
        _PATH | {"old": RawText(), "new": RawText()},
        is_write=True,
    ),
    "delete_file": ToolSpec(files.delete_file, "delete a file", _PATH, is_write=True),
    "glob": ToolSpec(_glob, "find files by shell pattern", {"pattern": RawText()}),
    "grep": ToolSpec(
        _grep,
        "find lines by regular expression",
        {"pattern": RawText(), "path": RawText(default=".")},
    ),
    "run_terminal": ToolSpec(_run_terminal, "run a shell command", {"command": RawText()}),
    "finish": ToolSpec(_finish, "end the work", {"answer": RawText(default="")}),
}
