"""Which tools there are, and the arguments that each takes."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.envs.harness import files, search, terminal
from penstock.envs.harness.result import InvalidCallError
from penstock.envs.sandbox import Sandbox
from penstock.messages.rollout import ToolCall
from penstock.messages.task import Limits

Tool = Callable[[Sandbox, dict[str, str], Limits], Awaitable[str]]


@dataclass(frozen=True)
class ToolSpec:
    """One tool and its argument schema; every argument is text."""

    run: Tool
    description: str
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    is_write: bool = False
    """Whether it changes the file at its `path`: such calls of one turn run in their order."""


TOOLS: dict[str, ToolSpec] = {
    "list_dir": ToolSpec(search.list_dir, "list a directory", (), ("path",)),
    "read_file": ToolSpec(files.read_file, "read a text file", ("path",)),
    "write_file": ToolSpec(
        files.write_file, "write a whole file", ("path", "content"), is_write=True
    ),
    "edit_file": ToolSpec(
        files.edit_file,
        "replace old, which must be there once, by new",
        ("path", "old", "new"),
        is_write=True,
    ),
    "delete_file": ToolSpec(files.delete_file, "delete a file", ("path",), is_write=True),
    "glob": ToolSpec(search.glob, "find files by shell pattern", ("pattern",)),
    "grep": ToolSpec(search.grep, "find lines by regular expression", ("pattern",), ("path",)),
    "run_terminal": ToolSpec(terminal.run_terminal, "run a shell command", ("command",)),
    "finish": ToolSpec(terminal.finish, "end the work", (), ("answer",)),
}
FINISH = "finish"


CALLS_MAX = 8
"""Calls of one turn that are carried out; further ones are invalid."""


def checked_spec(call: ToolCall, index: int) -> ToolSpec:
    """Return the spec of a call whose name and arguments fit it.

    Args:
        call: as the policy made it.
        index: its place in the turn, from 0.

    Raises:
        InvalidCallError: an unknown tool, a missing or unknown argument, or too many calls.

    """
    if index >= CALLS_MAX:
        raise InvalidCallError(f"at most {CALLS_MAX} calls a turn")
    spec = TOOLS.get(call.name)
    if spec is None:
        raise InvalidCallError(f"no tool {call.name}")
    missing = [name for name in spec.required if name not in call.arguments]
    if missing:
        raise InvalidCallError(f"{call.name} needs {', '.join(missing)}")
    known = {*spec.required, *spec.optional}
    unknown = [name for name in call.arguments if name not in known]
    if unknown:
        raise InvalidCallError(f"{call.name} takes no {', '.join(unknown)}")
    return spec


def tool_schemas() -> list[dict[str, object]]:
    """Return the tools in the form that chat-completion clients send and expect."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": spec.description,
                "parameters": {
                    "type": "object",
                    "properties": {a: {"type": "string"} for a in spec.required + spec.optional},
                    "required": list(spec.required),
                    "additionalProperties": False,
                },
            },
        }
        for name, spec in TOOLS.items()
    ]
