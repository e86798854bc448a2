"""What an episode's prompt says of its tools, by version of the harness.

The wording is part of a version: what a policy learned under it, and every logged context, depend
on each byte. `tests/unit/harness/test_harness_wording.py` holds its digest.
"""

from collections.abc import Collection

from penstock.envs.harness import HARNESS_VERSION, HARNESS_VERSION_2, HARNESS_VERSIONS
from penstock.envs.harness.arguments import Argument, ArgumentType
from penstock.envs.harness.registry import TOOLS
from penstock.envs.harness.tools import TOOLS_2
from penstock.messages.errors import NotFoundError


def tools_prompt(version: str) -> str:
    """Return the system message of an episode; empty where the prompt says nothing of tools.

    Version 1 is learned in mid-training and needs no words. Version 2 names every tool with its
    arguments, one tool a line: `name argument argument=default`.

    Raises:
        NotFoundError: No such version; the text lists them.

    """
    if version not in HARNESS_VERSIONS:
        choices = ", ".join(HARNESS_VERSIONS)
        raise NotFoundError(f"harness version {version!r}: expected one of {choices}")
    if version != HARNESS_VERSION_2:
        return ""
    return "\n".join(_line(name, tool.arguments) for name, tool in TOOLS_2.items())


def prompt_for(tools: Collection[str]) -> str | None:
    """Return the system message of the version that has these tools and no other, or None."""
    if set(tools) == TOOLS.keys():
        return tools_prompt(HARNESS_VERSION)
    return tools_prompt(HARNESS_VERSION_2) if set(tools) == TOOLS_2.keys() else None


def _line(name: str, arguments: dict[str, Argument]) -> str:
    return " ".join([name, *(_shown(key, one) for key, one in arguments.items())])


def _shown(name: str, argument: Argument) -> str:
    if argument.is_required:
        return name
    default = argument.default
    shown = str(default).lower() if argument.kind is ArgumentType.FLAG else str(default)
    return f"{name}={shown}"
