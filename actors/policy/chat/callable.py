"""Checks that a chat format can write and read calls of a tool.

Formats differ in the names that they can carry, e.g. `<parameter=NAME>`. Instead of a rule per
format, a call is rendered and parsed: a call that does not survive this would reach the client as
text.
"""

from functools import lru_cache

from penstock.actors.policy.chat.format import (
    ChatFormat,
    ChatMessage,
    OfferedTools,
    ParsedTurn,
    Role,
    UnrenderableError,
)
from penstock.messages.rollout import ToolCall

_NUM_CHECKED_MAX = 4096
"""Maximum tools whose check is remembered."""


@lru_cache(_NUM_CHECKED_MAX)
def can_call(chat: ChatFormat, name: str, arguments: tuple[str, ...]) -> bool:
    """Return whether a call with these argument names survives rendering and parsing."""
    properties = {argument: {"type": "string"} for argument in arguments}
    schema = {
        "name": name,
        "description": "",
        "parameters": {"type": "object", "properties": properties},
    }
    tools = OfferedTools(schemas=[schema])
    call = ToolCall(name=name, arguments=dict.fromkeys(arguments, "x"))
    try:
        prompt = chat.render_prompt([ChatMessage(role=Role.USER, content="Go.")], tools)
        turn = chat.render_turn("", [call], tools)
        return chat.parse_turn(turn, prompt, tools) == ParsedTurn(text="", calls=(call,))
    except UnrenderableError:
        return False
