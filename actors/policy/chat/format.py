"""The interface of a chat format, which converts between conversations and token ids.

Sampled ids are never tokenized again: a multi-turn context is the concatenation of `render_prompt`,
sampled ids, `render_observation`, sampled ids, and so on.
"""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from penstock.actors.policy.chat.argument_types import typed_value
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.messages.errors import PenstockError
from penstock.messages.rollout import ToolCall


class Role(StrEnum):
    """Author of a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Role
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls of an assistant's message, which follow its content."""


class OfferedTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a conversation, described in two ways; each format uses one of them."""

    words: str = ""
    """System message for policies trained from scratch here; empty if they need none."""
    schemas: Sequence[dict[str, Any]] = ()
    """Function schemas as chat-completion clients send them: name, description, parameters."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the tools that have a schema, and of their arguments."""
        names: set[str] = set()
        for schema in self.schemas:
            parameters = schema.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            names |= {str(schema.get("name")), *(properties or ())}
        return frozenset(names)

    def typed_arguments(self, call: ToolCall) -> dict[str, Any]:
        """Convert a call's arguments from text to the types that the function's schema declares."""
        for schema in self.schemas:
            if schema.get("name") == call.name:
                return typed_arguments(call, schema.get("parameters"))
        return dict(call.arguments)


class ParseFailureReason(StrEnum):
    """Reason why a turn could not be parsed."""

    UNFINISHED = "unfinished"
    """Missing end token, because sampling was cut short."""
    UNEXPECTED = "unexpected"
    """Token in a place where the format does not allow it."""
    BAD_NAME = "bad_name"
    DUPLICATE_ARGUMENT = "duplicate_argument"
    BAD_CALL = "bad_call"
    """Call that violates the syntax of the format."""


class ParseFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Result of parsing a malformed turn."""

    reason: ParseFailureReason
    detail: str
    position: int = 0
    """Index of the offending token in the turn."""


class ParsedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A well-formed turn; without calls, its text is the final answer."""

    text: str
    calls: tuple[ToolCall, ...]


class UnrenderableError(PenstockError, ValueError):
    """A conversation that the format cannot represent."""


class ChatFormat(Protocol):
    """Renders conversations to token ids and parses sampled turns."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the policy."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn; rendered turns end with the first one."""
        ...

    @property
    def call_end_id(self) -> int | None:
        """Token that ends a call; None if the format has none."""
        ...

    def render_prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: OfferedTools,
        sampled: Mapping[int, Sequence[int]] | None = None,
    ) -> list[int]:
        """Render a conversation up to the point where the assistant's next turn is sampled.

        Args:
            messages: Messages of the conversation.
            tools: Tools that the assistant may call.
            sampled: Ids of assistant messages as the policy sampled them, by message index.

        Raises:
            UnrenderableError: The format cannot represent the conversation.

        """
        ...

    def render_turn(self, text: str, calls: Sequence[ToolCall], tools: OfferedTools) -> list[int]:
        """Render the ids that a policy would sample for a turn, including the end token."""
        ...

    def render_observation(
        self,
        context_ids: Sequence[int],
        turn_ids: Sequence[int],
        results: Sequence[tuple[str, str]],
        tools: OfferedTools,
        request: str = "",
    ) -> list[int] | None:
        """Render the results of a turn's calls, in order, and open the next turn.

        Args:
            context_ids: All ids before the turn.
            turn_ids: Ids of the turn as sampled.
            results: Tool name (empty if there was no call) and output of each call.
            tools: Tools that the assistant may call.
            request: User message after the results; empty for none.

        Returns:
            The ids that follow the turn; None if nothing can follow such a turn.

        """
        ...

    def parse_turn(
        self, token_ids: Sequence[int], context_ids: Sequence[int], tools: OfferedTools
    ) -> ParsedTurn | ParseFailure:
        """Parse one sampled turn, including its end token.

        Args:
            token_ids: Ids of the turn.
            context_ids: Ids before the turn, ending with the prompt or observation that opened it.
            tools: Tools that the assistant may call; some formats need their argument types.

        """
        ...


def typed_arguments(call: ToolCall, parameters: Any) -> dict[str, Any]:
    """Convert a call's arguments from text to the types that the tool's schema declares.

    Args:
        call: Call as the policy wrote it.
        parameters: Schema of all arguments, from a client; anything but an object declares nothing.

    """
    root = parameters if isinstance(parameters, dict) else {}
    properties = root.get("properties")
    declared = properties if isinstance(properties, dict) else {}
    return {
        name: typed_value(value, declared.get(name, {}), root)
        for name, value in call.arguments.items()
    }


def argument_text(value: Any) -> str:
    """Return the text form of an argument, as `ToolCall` stores it."""
    return (
        value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    )
