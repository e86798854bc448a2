"""Reading, listing and finding of version 2: with line numbers, depth and context."""

from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from penstock.envs.harness.files import readable_text
from penstock.envs.harness.line_endings import split_lines
from penstock.envs.harness.tool_calls import InvalidCallError, checked_path, shown_path
from penstock.envs.harness.toolbox import Toolbox
from penstock.envs.sandbox import WORK_DIR

SHOWN_MAX = 500
LINES_DEFAULT = 1_000
_NO_MATCH = 1


async def read_file(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    """Return some lines of a file with their numbers."""
    path = checked_path(arguments["path"])
    text = await readable_text(toolbox, path)
    return numbered_lines(path, text, arguments["offset"], arguments["limit"])


def numbered_lines(path: str, text: str, first: int, num: int) -> str:
    """Return what `read_file` returns for a file with this text.

    Raises:
        InvalidCallError: The file has no line `first`.

    """
    lines = split_lines(text)
    if not lines:
        return "[empty file]"
    if first > len(lines):
        raise InvalidCallError(f"{path} has {len(lines)} lines")
    shown = [f"{n:>6}\t{line}" for n, line in enumerate(lines[first - 1 :][:num], first)]
    left = len(lines) - (first - 1) - len(shown)
    return "\n".join([*shown, *([f"[{left} more lines]"] if left else [])])


async def list_dir(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    """List a directory to a depth; directories end in a slash."""
    base = PurePosixPath(checked_path(arguments["path"]))
    depth = arguments["depth"]
    found: set[str] = set()
    for path in await toolbox.sandbox.list_files(WORK_DIR):
        pure = PurePosixPath(path)
        if not pure.is_relative_to(base) or _is_hidden(pure):
            continue
        parts = pure.relative_to(base).parts
        found |= {"/".join(parts[:end]) + "/" for end in range(1, min(len(parts), depth + 1))}
        if len(parts) <= depth:
            found.add("/".join(parts))
    if not found:
        raise InvalidCallError(f"no directory {base}, or nothing in it")
    return _shortened(sorted(map(shown_path, found)))


async def glob(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    """List the files whose path or name matches a shell pattern."""
    pattern = arguments["pattern"]
    found = [
        path
        for path in await toolbox.sandbox.list_files(WORK_DIR)
        if not _is_hidden(PurePosixPath(path))
        and (fnmatchcase(path, pattern) or fnmatchcase(PurePosixPath(path).name, pattern))
    ]
    return _shortened([*map(shown_path, found)]) or "no match"


async def grep(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    """Search lines by an extended regular expression; `path:line:text`."""
    options = ["-i"] if arguments["ignore_case"] else []
    options += [f"-C{arguments['context']}"] if arguments["context"] else []
    options += [f"--include={arguments['include']}"] if arguments["include"] else []
    path = checked_path(arguments["path"])
    command = ["grep", "-rInE", "--exclude-dir=.git", *options, "-e", arguments["pattern"], "--"]
    done = await toolbox.sandbox.exec(
        [*command, path],
        timeout_s=toolbox.limits.tool_s_max,
        output_bytes_max=toolbox.limits.output_bytes_max,
    )
    if done.timed_out:
        raise InvalidCallError("the search took too long")
    if done.exit_code > _NO_MATCH:
        raise InvalidCallError(done.stderr.decode("utf-8", "replace").strip() or "grep failed")
    output = done.stdout.decode("utf-8", "surrogateescape")
    lines = [shown_match(line.removeprefix("./")) for line in split_lines(output)]
    ordered = lines if arguments["context"] else sorted(lines, key=_by_place)
    return "\n".join(ordered) or "no match"


async def codebase_search(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    """Find code by what it does."""
    below = checked_path(arguments["path"])
    return await toolbox.search.find(arguments["query"], below, arguments["num"])


def shown_match(line: str) -> str:
    """Return a line of `grep` with its path as `shown_path`."""
    path, colon, text = line.partition(":")
    return f"{shown_path(path)}{colon}{text}"


def _is_hidden(path: PurePosixPath) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _by_place(line: str) -> tuple[str, int]:
    path, _, rest = line.partition(":")
    number = rest.partition(":")[0]
    return path, int(number) if number.isdigit() else 0


def _shortened(names: list[str]) -> str:
    left = len(names) - SHOWN_MAX
    return "\n".join([*names[:SHOWN_MAX], *([f"[{left} more]"] if left > 0 else [])])
