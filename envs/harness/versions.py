"""What each version of the harness offers, and what a prompt holds of it.

The wording is part of a version: what a policy learned under it, and every logged context, depend
on each byte. `tests/unit/harness/test_harness_wording.py` holds its digest.
"""

from collections.abc import Collection, Mapping
from typing import cast

from penstock.envs.harness import HARNESS_VERSION, HARNESS_VERSION_2
from penstock.envs.harness.tool_calls import Argument, ArgumentType
from penstock.envs.harness.toolbox import ToolSpec
from penstock.envs.harness.tools_v1 import TOOLS_1
from penstock.envs.harness.tools_v2 import TOOLS_2
from penstock.messages.errors import ConfigError, NotFoundError
from penstock.messages.reading.references import is_reference, load_reference

_TOOLS: dict[str, dict[str, ToolSpec]] = {HARNESS_VERSION: TOOLS_1, HARNESS_VERSION_2: TOOLS_2}
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
