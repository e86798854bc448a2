"""The tools of version 1: few, and every argument a text. They never change.

The tools of version 1: few, and every argument a text. They never change.

The tools of version 2 and their schemas.

What each version of the harness offers, and what a prompt holds of it.

The wording is part of a version: what a policy learned under it, and every logged context, depend
on each byte. `tests/unit/harness/test_harness_wording.py` holds its digest.
"""

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, cast

from penstock.envs.harness import HARNESS_VERSION, HARNESS_VERSION_2, files, lookup
from penstock.envs.harness.tool_calls import (
    Argument,
    ArgumentType,
    InvalidCallError,
    RawText,
    checked_path,
    shown_path,
)
from penstock.envs.harness.toolbox import Toolbox, ToolSpec
from penstock.envs.sandbox import WORK_DIR
from penstock.messages.errors import ConfigError, NotFoundError
from penstock.messages.reading.references import is_reference, load_reference

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
    names = {
        shown_path(f"{path.parts[0]}/" if len(path.parts) > 1 else str(path)) for path in inside
    }
    if not names:
        raise InvalidCallError(f"no directory {base}")
    return "\n".join(sorted(names))


async def _glob(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    """List the files whose path matches a shell pattern; `*` crosses slashes."""
    pattern = _checked_pattern(arguments["pattern"])
    found = [
        path for path in await toolbox.sandbox.list_files(WORK_DIR) if fnmatchcase(path, pattern)
    ]
    return "\n".join(map(shown_path, found)) or "no match"


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
    lines = done.stdout.decode("utf-8", "surrogateescape").split("\n")
    shown = sorted(lookup.shown_match(line.removeprefix("./")) for line in lines if line)
    return "\n".join(shown) or "no match"


def _checked_pattern(pattern: str) -> str:
    if not pattern or len(pattern) > _PATTERN_CHARACTERS_MAX or not pattern.isprintable():
        most = _PATTERN_CHARACTERS_MAX
        raise InvalidCallError(f"pattern must be 1 to {most} printable characters")
    return pattern


async def _run_terminal_v1(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
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


async def _finish_v1(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
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
    "run_terminal": ToolSpec(_run_terminal_v1, "run a shell command", {"command": RawText()}),
    "finish": ToolSpec(_finish_v1, "end the work", {"answer": RawText(default="")}),
}


TEXT_MAX = files.FILE_BYTES_MAX


async def _read_lints(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    return await toolbox.lints.read(checked_path(arguments["path"]))


async def _run_terminal_v2(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    command: str = arguments["command"]
    if arguments["background"]:
        return await toolbox.jobs.start(command)
    return await toolbox.shell.run(command)


async def _terminal_io(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    return await toolbox.jobs.speak(
        arguments["job"], arguments["input"], arguments["wait_s"], stops=arguments["stop"]
    )


async def _finish_v2(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    return "done"


def _path(default: str | None = None, what: str = "relative to the repository") -> Argument:
    return Argument(what, default=default, bound_min=1, bound_max=255)


TOOLS_2: dict[str, ToolSpec] = {
    "read_file": ToolSpec(
        lookup.read_file,
        "Read lines of a text file, with their numbers.",
        {
            "path": _path(),
            "offset": Argument("first line, from 1", ArgumentType.INTEGER, 1, 1, 1_000_000),
            "limit": Argument(
                "number of lines", ArgumentType.INTEGER, lookup.LINES_DEFAULT, 1, 10_000
            ),
        },
        is_read=True,
    ),
    "write_file": ToolSpec(
        files.write_file,
        "Write a whole file, new or not.",
        {"path": _path(), "content": Argument("the file's text", bound_max=TEXT_MAX)},
        is_write=True,
    ),
    "edit_file": ToolSpec(
        files.edit_file,
        "Replace old, which must be in the file exactly once, by new; returns the changed lines.",
        {
            "path": _path(),
            "old": Argument("text to replace", bound_min=1, bound_max=TEXT_MAX),
            "new": Argument("text to put there", bound_max=TEXT_MAX),
        },
        is_write=True,
    ),
    "delete_file": ToolSpec(
        files.delete_file, "Delete one file.", {"path": _path()}, is_write=True
    ),
    "list_dir": ToolSpec(
        lookup.list_dir,
        "List a directory.",
        {"path": _path("."), "depth": Argument("levels to show", ArgumentType.INTEGER, 1, 1, 8)},
    ),
    "glob": ToolSpec(
        lookup.glob,
        "Find files whose path or name matches a shell pattern.",
        {"pattern": Argument("e.g. *.py or src/*_test.py", bound_min=1, bound_max=256)},
    ),
    "grep": ToolSpec(
        lookup.grep,
        "Find lines by extended regular expression.",
        {
            "pattern": Argument("the expression", bound_min=1, bound_max=512),
            "path": _path(".", "file or directory to search"),
            "include": Argument("only files of this name pattern", default="", bound_max=128),
            "ignore_case": Argument("match any case", ArgumentType.FLAG, default=False),
            "context": Argument("lines to show around each match", ArgumentType.INTEGER, 0, 0, 20),
        },
    ),
    "codebase_search": ToolSpec(
        lookup.codebase_search,
        "Find code by what it does, in plain words.",
        {
            "query": Argument("what you look for", bound_min=2, bound_max=512),
            "path": _path(".", "directory to search"),
            "num": Argument("number of results", ArgumentType.INTEGER, 8, 1, 50),
        },
    ),
    "read_lints": ToolSpec(
        _read_lints,
        "Show lints of a Python file or of a directory's.",
        {"path": _path(".", "file or directory")},
    ),
    "run_terminal": ToolSpec(
        _run_terminal_v2,
        "Run a bash command; directory and exported variables last from one to the next.",
        {
            "command": Argument("the command", bound_min=1, bound_max=8_000),
            "background": Argument(
                "start it as a job and return", ArgumentType.FLAG, default=False
            ),
        },
        is_terminal=True,
    ),
    "terminal_io": ToolSpec(
        _terminal_io,
        "Read a job's new output; write to it, wait for it, or stop it.",
        {
            "job": Argument("its number", ArgumentType.INTEGER, None, 1, 1_000),
            "input": Argument("text for its input", default="", bound_max=4_000),
            "wait_s": Argument("longest wait for new output", ArgumentType.INTEGER, 0, 0, 60),
            "stop": Argument("end the job", ArgumentType.FLAG, default=False),
        },
    ),
    "finish": ToolSpec(
        _finish_v2, "End the work.", {"answer": Argument("a summary", default="", bound_max=8_000)}
    ),
}


_TOOLS: dict[str, dict[str, ToolSpec]] = {
    HARNESS_VERSION: TOOLS_1,
    HARNESS_VERSION_2: TOOLS_2,
}
_ALL = [(name, tool) for tools in _TOOLS.values() for name, tool in tools.items()]
READING_TOOLS = frozenset(name for name, tool in _ALL if tool.is_read)
"""Tools of all versions that show a file."""
WRITING_TOOLS = frozenset(name for name, tool in _ALL if tool.is_write)
"""Tools of all versions that change a file."""


def tools_of(version: str) -> Mapping[str, ToolSpec]:
    """Return the tools of a version by name; a version may also be own code, `module:name`.

    Raises:
        NotFoundError: No such version; the text lists them.
        ConfigError: The own code is not there, or no table of tools with `finish`.

    """
    if is_reference(version):
        own = load_reference(version, "pacer.harness")
        if not isinstance(own, dict) or "finish" not in own or not all(map(_is_entry, own.items())):
            text = "expected a dict of ToolSpec by name, finish among them"
            raise ConfigError(f"pacer.harness: {version!r}: {text}")
        return cast("dict[str, ToolSpec]", own)
    if version not in _TOOLS:
        choices = ", ".join(_TOOLS)
        raise NotFoundError(f"harness version {version!r}: expected one of {choices}")
    return _TOOLS[version]


def _is_entry(entry: tuple[object, object]) -> bool:
    return isinstance(entry[0], str) and isinstance(entry[1], ToolSpec)


def tool_schemas(version: str) -> list[dict[str, object]]:
    """Return the tools in the form that chat-completion clients send and expect."""
    return [{"type": "function", "function": one} for one in functions_of(version)]


def functions_of(version: str) -> list[dict[str, object]]:
    """Return the functions of `tool_schemas`: name, description and parameters of each."""
    return [
        {
            "name": name,
            "description": tool.description,
            "parameters": {
                "type": "object",
                "properties": {key: one.schema() for key, one in tool.arguments.items()},
                "required": [k for k, one in tool.arguments.items() if one.is_required],
                "additionalProperties": False,
            },
        }
        for name, tool in tools_of(version).items()
    ]


def tools_prompt(version: str) -> str:
    """Return the system message of an episode; empty where the prompt names no tools.

    Version 1 is learned in mid-training and needs no words. Version 2 names every tool with its
    arguments, one tool per line: `name argument argument=default`.

    Raises:
        NotFoundError: No such version; the text lists them.

    """
    tools = tools_of(version)
    if version == HARNESS_VERSION:
        return ""
    return "\n".join(_line(name, tool.arguments) for name, tool in tools.items())


def prompt_for(tools: Collection[str]) -> str | None:
    """Return the system message of the version that has these tools and no other, or None."""
    for version, offered in _TOOLS.items():
        if set(tools) == offered.keys():
            return tools_prompt(version)
    return None


def _line(name: str, arguments: Mapping[str, Argument]) -> str:
    return " ".join([name, *(_shown(key, one) for key, one in arguments.items())])


def _shown(name: str, argument: Argument) -> str:
    if argument.is_required:
        return name
    default = argument.default
    shown = str(default).lower() if argument.kind is ArgumentType.FLAG else str(default)
    return f"{name}={shown}"
