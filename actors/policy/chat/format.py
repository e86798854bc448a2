"""What a chat format is: the one interface between conversations and token ids.

What the policy sampled is never tokenized again: a multi-turn context is the concatenation of
`render_prompt`, sampled ids, `render_observation`, sampled ids, and so on.
"""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from penstock.actors.policy.tokenizer import Tokenizer
from penstock.messages.errors import CodecError, PenstockError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.rollout import ToolCall

_JSON_TYPES: dict[str, Any] = {
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list[Any],
    "object": dict[str, Any],
}


class Role(StrEnum):
    """Who wrote a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Role
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    """What an assistant's message calls, after its content."""


class OfferedTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a conversation; a format uses what its policies have learned to read."""

    words: str = ""
    """A system message for policies that were trained here; empty where they need none."""
    schemas: Sequence[dict[str, Any]] = ()
    """The functions as chat-completion clients send them: name, description, parameters."""

    def typed_arguments(self, call: ToolCall) -> dict[str, Any]:
        """Return a call's arguments, which are texts, in the types of the function's schema."""
        for schema in self.schemas:
            if schema.get("name") == call.name:
                parameters = schema.get("parameters")
                return typed_arguments(call, _table(_table(parameters).get("properties")))
        return dict(call.arguments)


class ParseFailureReason(StrEnum):
    """What is wrong with a turn."""

    UNFINISHED = "unfinished"
    """The end token is missing: sampling was cut short."""
    UNEXPECTED = "unexpected"
    """A token where the format allows none of its kind."""
    BAD_NAME = "bad_name"
    DUPLICATE_ARGUMENT = "duplicate_argument"
    BAD_CALL = "bad_call"
    """A call that is not of the format's syntax."""


class ParseFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that is neither calls nor a final answer."""

    reason: ParseFailureReason
    detail: str
    position: int = 0
    """Index of the offending token in the turn."""


class ParsedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A well-formed turn; without calls its text is the final answer."""

    text: str
    calls: tuple[ToolCall, ...]


class UnrenderableError(PenstockError, ValueError):
    """A conversation that the format cannot hold."""


class ChatFormat(Protocol):
    """Renders conversations to token ids and parses sampled turns."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn; the first is the one that a rendered turn ends with."""
        ...

    @property
    def call_end_id(self) -> int | None:
        """The token that ends a call, where the format has one."""
        ...

    def render_prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: OfferedTools,
        sampled: Mapping[int, Sequence[int]] | None = None,
    ) -> list[int]:
        """Render a conversation up to where the assistant's next turn is sampled.

        Args:
            messages: the conversation.
            tools: what the assistant may call.
            sampled: ids of assistant messages, by index, as the policy sampled them.

        Raises:
            UnrenderableError: The format has no such conversation.

        """
        ...

    def render_turn(self, text: str, calls: Sequence[ToolCall], tools: OfferedTools) -> list[int]:
        """Render what a policy would have to sample, with its end token."""
        ...

    def render_observation(
        self,
        context_ids: Sequence[int],
        turn_ids: Sequence[int],
        results: Sequence[tuple[str, str]],
        tools: OfferedTools,
        request: str = "",
    ) -> list[int] | None:
        """Render the results of a turn's calls, in their order, and open the next turn.

        Args:
            context_ids: everything before the turn.
            turn_ids: the turn, as sampled.
            results: name of the tool, empty if there was no call, and what it returned.
            tools: what the assistant may call.
            request: what a user says after them; empty for nothing.

        Returns:
            What follows the turn's ids; None if nothing can follow such a turn.

        """
        ...

    def parse_turn(
        self, token_ids: Sequence[int], context_ids: Sequence[int], tools: OfferedTools
    ) -> ParsedTurn | ParseFailure:
        """Parse one sampled turn, end token included.

        Args:
            token_ids: the turn.
            context_ids: what opened it: the prompt, or the observation before it.
            tools: what the assistant may call; some formats leave the types of arguments to it.

        """
        ...


def typed_arguments(call: ToolCall, properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments in the types that a schema's properties ask for."""
    return {
        name: _as_type(value, _table(properties.get(name)).get("type"))
        for name, value in call.arguments.items()
    }


def argument_text(value: Any) -> str:
    """Return an argument as the text that a `ToolCall` holds."""
    return (
        value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    )


def _as_type(value: str, type_name: Any) -> Any:
    """Return `value` in the schema's type, or as it is where it does not read as that."""
    if not isinstance(type_name, str) or type_name not in _JSON_TYPES:
        return value
    try:
        return parse_json(value, _JSON_TYPES[type_name], "argument")
    except CodecError:
        return value


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
