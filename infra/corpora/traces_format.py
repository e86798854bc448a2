"""The shape of a conversation's line (`traces.py`)."""

from typing import Any, Literal

import msgspec


class TraceFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Called function; its arguments are JSON text (perhaps cut off) or an object."""

    name: str
    arguments: Any = None


class TraceCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of an assistant's calls."""

    function: TraceFunction
    id: str = ""
    type: Literal["function"] = "function"


class TraceMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One message; what would be left out of the rendered tokens is refused by name."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[TraceCall] | None = None
    tool_call_id: str = ""
    name: str = ""


class TraceTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that the assistant was offered."""

    function: dict[str, Any]
    type: Literal["function"] = "function"


class ChatTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of a file."""

    messages: list[TraceMessage]
    tools: list[TraceTool] | None = None
    metadata: dict[str, Any] = {}
    """Not read: where the conversation comes from."""
