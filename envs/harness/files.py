"""Tools on single files. They go through the guest agent's file operations: no process starts."""

import difflib
from typing import Any

from penstock.envs.harness.line_endings import (
    find_shown,
    only_ending,
    replaced,
    split_lines,
    with_ending,
)
from penstock.envs.harness.tool_calls import InvalidCallError, checked_path
from penstock.envs.harness.toolbox import Toolbox
from penstock.envs.sandbox import WORK_DIR, Sandbox, SandboxFileError

FILE_BYTES_MAX = 256 * 1024
"""Largest file that a tool reads or writes."""
LINES_COMPARED_MAX = 2_000
"""Lines of a file before and after an edit that are compared whole."""


async def read_file(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    """Return a file's text."""
    return await readable_text(toolbox, checked_path(arguments["path"]))


async def write_file(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    """Write a whole file, new or not."""
    path = checked_path(arguments["path"])
    content: str = arguments["content"]
    if "\n" in content and "\r" not in content:
        content = await _in_endings_of(toolbox.sandbox, path, content)
    await _write(toolbox.sandbox, path, content)
    return f"wrote {path}"


async def edit_file(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    """Replace the one occurrence of `old` by `new`; return the changed lines."""
    path = checked_path(arguments["path"])
    old, new = arguments["old"], arguments["new"]
    if not old:
        raise InvalidCallError("old is empty")
    if old == new:
        raise InvalidCallError("old and new are the same")
    before = await read_text(toolbox.sandbox, path)
    found = find_shown(before, old)
    if len(found) != 1:
        text = f"old is there {len(found)}x" if found else "old is not in the file"
        raise InvalidCallError(text)
    after = replaced(before, found[0], old, new)
    await _write(toolbox.sandbox, path, after)
    return changed_lines(before, after)


async def delete_file(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    """Delete one file."""
    path = checked_path(arguments["path"])
    if path not in await toolbox.sandbox.list_files(WORK_DIR):
        raise InvalidCallError(f"no file {path}")
    command = ["rm", "--", path]
    done = await toolbox.sandbox.exec(command, timeout_s=toolbox.limits.tool_s_max)
    if done.exit_code != 0:
        raise InvalidCallError(done.stderr.decode("utf-8", "replace").strip())
    return f"deleted {path}"


async def readable_text(toolbox: Toolbox, path: str) -> str:
    """Return what `read_file` shows of a path: a page of the task, once, or a file of the machine.

    Raises:
        InvalidCallError: The page was read before; as `read_text`.

    """
    if path in toolbox.pages:
        return toolbox.pages.read(path)
    return await read_text(toolbox.sandbox, path)


async def read_text(sandbox: Sandbox, path: str) -> str:
    """Return a text file's content.

    Raises:
        InvalidCallError: It is absent, too large, or no UTF-8 text.

    """
    try:
        data = await sandbox.read_file(path, FILE_BYTES_MAX + 1)
    except SandboxFileError as error:
        raise InvalidCallError(f"no file {path}") from error
    if len(data) > FILE_BYTES_MAX:
        raise InvalidCallError(f"{path} exceeds {FILE_BYTES_MAX} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidCallError(f"{path} is no UTF-8 text") from error


async def _in_endings_of(sandbox: Sandbox, path: str, text: str) -> str:
    """Return a text in the line endings of the file that it replaces, if all of those are alike."""
    try:
        ending = only_ending(await read_text(sandbox, path))
    except InvalidCallError:
        return text
    return text if ending is None else with_ending(text, ending)


async def _write(sandbox: Sandbox, path: str, text: str) -> None:
    data = text.encode("utf-8", "replace")
    if len(data) > FILE_BYTES_MAX:
        raise InvalidCallError(f"the file would exceed {FILE_BYTES_MAX} bytes")
    try:
        await sandbox.write_files({path: data})
    except SandboxFileError as error:
        raise InvalidCallError(f"cannot write {path}") from error


def _between(old: list[str], new: list[str]) -> tuple[list[str], list[str]]:
    """Return both without the lines that they begin and end with alike."""
    shorter = min(len(old), len(new))
    first = next((n for n in range(shorter) if old[n] != new[n]), shorter)
    left = shorter - first
    last = next((n for n in range(left) if old[-1 - n] != new[-1 - n]), left)
    return old[first : len(old) - last], new[first : len(new) - last]


def changed_lines(before: str, after: str) -> str:
    """Return a unified diff without context and headers.

    Of a large file only what lies between its unchanged first and last lines is compared: the
    comparison takes time with the square of how often a line repeats.
    """
    old, new = split_lines(before), split_lines(after)
    if old == new and before != after:
        return "only line endings changed"
    if len(old) + len(new) > LINES_COMPARED_MAX:
        old, new = _between(old, new)
    diff = difflib.unified_diff(old, new, lineterm="", n=0)
    body = list(diff)[2:]
    return "\n".join(line for line in body if not line.startswith("@@")) or "no line changed"
