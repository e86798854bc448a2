"""Tools that find files and lines."""

from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from penstock.envs.harness.paths import checked_path
from penstock.envs.harness.result import InvalidCallError
from penstock.envs.sandbox import WORK_DIR, Sandbox
from penstock.messages.task import Limits

_PATTERN_CHARACTERS_MAX = 256
_NO_MATCH = 1


async def list_dir(sandbox: Sandbox, arguments: dict[str, str], limits: Limits) -> str:
    """List a directory's files and directories, one per line; directories end in a slash."""
    base = PurePosixPath(checked_path(arguments.get("path", ".")))
    inside = [
        PurePosixPath(path).relative_to(base)
        for path in await sandbox.list_files(WORK_DIR)
        if PurePosixPath(path).is_relative_to(base)
    ]
    names = {f"{path.parts[0]}/" if len(path.parts) > 1 else str(path) for path in inside}
    if not names:
        raise InvalidCallError(f"no directory {base}")
    return "\n".join(sorted(names))


async def glob(sandbox: Sandbox, arguments: dict[str, str], limits: Limits) -> str:
    """List the files whose path matches a shell pattern; `*` crosses slashes."""
    pattern = _checked_pattern(arguments["pattern"])
    found = [path for path in await sandbox.list_files(WORK_DIR) if fnmatchcase(path, pattern)]
    return "\n".join(found) or "no match"


async def grep(sandbox: Sandbox, arguments: dict[str, str], limits: Limits) -> str:
    """Search lines by an extended regular expression, below an optional path.

    The search runs in the machine, so that a costly pattern costs nobody else.
    """
    pattern = _checked_pattern(arguments["pattern"])
    path = checked_path(arguments["path"]) if "path" in arguments else "."
    done = await sandbox.exec(
        ["grep", "-rIE", "-e", pattern, "--", path],
        timeout_s=limits.tool_s_max,
        output_bytes_max=limits.output_bytes_max,
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
