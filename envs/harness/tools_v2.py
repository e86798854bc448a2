"""The tools of version 2 and their schemas."""

from typing import Any

from penstock.envs.harness import files, lookup
from penstock.envs.harness.tool_calls import Argument, ArgumentType, checked_path
from penstock.envs.harness.toolbox import Toolbox, ToolSpec

TEXT_MAX = files.FILE_BYTES_MAX


async def _read_lints(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    return await toolbox.lints.read(checked_path(arguments["path"]))


async def _run_terminal(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    command: str = arguments["command"]
    if arguments["background"]:
        return await toolbox.jobs.start(command)
    return await toolbox.shell.run(command)


async def _terminal_io(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
    return await toolbox.jobs.speak(
        arguments["job"], arguments["input"], arguments["wait_s"], stops=arguments["stop"]
    )


async def _finish(toolbox: Toolbox, arguments: dict[str, Any]) -> str:
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
        _run_terminal,
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
        _finish, "End the work.", {"answer": Argument("a summary", default="", bound_max=8_000)}
    ),
}
