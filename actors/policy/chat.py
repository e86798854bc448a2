"""The chat and tool-call format: messages to token ids, sampled ids to calls.

A conversation is a row of messages, each `<|role|> text <|end|>`. An assistant's turn is text,
then any number of calls:

    <call name="edit_file"><path>a.py</path><old>x < y</old><new>x <= y</new></call><|end|>

All structure is special tokens (`special_tokens.py`), one id each, so arguments need no escaping.
What the policy sampled is never tokenized again: a multi-turn context is the concatenation of
`render_prompt`, sampled ids, `render_observation`, sampled ids, and so on.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from penstock.actors.policy import special_tokens
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.messages.rollout import ToolCall


class Role(StrEnum):
    """Who wrote a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


_ROLE_TOKENS = {
    Role.SYSTEM: special_tokens.SYSTEM,
    Role.USER: special_tokens.USER,
    Role.ASSISTANT: special_tokens.ASSISTANT,
    Role.TOOL: special_tokens.TOOL,
}


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Role
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    """What an assistant's message calls, after its content."""


def opening_messages(tools: str, instruction: str) -> list[ChatMessage]:
    """Return what an episode begins with: its tools, where the prompt names them, and the task."""
    system = [ChatMessage(role=Role.SYSTEM, content=tools)] if tools else []
    return [*system, ChatMessage(role=Role.USER, content=instruction)]


def render_prompt(tokenizer: Tokenizer, messages: Sequence[ChatMessage]) -> list[int]:
    """Render a conversation and the token after which the assistant's next turn is sampled."""
    ids: list[int] = []
    for message in messages:
        ids.append(tokenizer.special_id(_ROLE_TOKENS[message.role]))
        ids += render_turn(tokenizer, message.content, message.calls)
    ids.append(tokenizer.special_id(special_tokens.ASSISTANT))
    return ids


def render_observation(tokenizer: Tokenizer, results: Sequence[str]) -> list[int]:
    """Render the results of a turn's calls, in their order, and open the next turn."""
    messages = [ChatMessage(role=Role.TOOL, content=result) for result in results]
    return render_prompt(tokenizer, messages)


def render_turn(tokenizer: Tokenizer, text: str, calls: Sequence[ToolCall] = ()) -> list[int]:
    """Render the body of a message with its end token: what a policy would have to sample."""
    ids = tokenizer.encode(text) if text else []
    for call in calls:
        ids += _render_call(tokenizer, call)
    ids.append(tokenizer.end_id)
    return ids


def _render_call(tokenizer: Tokenizer, call: ToolCall) -> list[int]:
    special_id = tokenizer.special_id
    known = special_tokens.call_open(call.name)
    ids = _opening(tokenizer, known, special_tokens.CALL_OPEN, call.name)
    for name, value in call.arguments.items():
        opening, closing = special_tokens.argument_open(name), special_tokens.argument_close(name)
        ids += _opening(tokenizer, opening, special_tokens.ARGUMENT_OPEN, name)
        ids += tokenizer.encode(value)
        ids.append(
            special_id(closing if tokenizer.has_special(opening) else special_tokens.ARGUMENT_CLOSE)
        )
    ids.append(special_id(special_tokens.CALL_CLOSE))
    return ids


def _opening(tokenizer: Tokenizer, known: str, generic: str, name: str) -> list[int]:
    if tokenizer.has_special(known):
        return [tokenizer.special_id(known)]
    spelled = tokenizer.encode(name)
    return [
        tokenizer.special_id(generic),
        *spelled,
        tokenizer.special_id(special_tokens.NAME_CLOSE),
    ]
