r"""Conversations for supervised fine-tuning: lines of JSON in the shape of chat completions.

    {"messages": [{"role": "user", "content": "..."},
                  {"role": "assistant", "tool_calls": [{"id": "c", "type": "function",
                   "function": {"name": "read_file", "arguments": "{\"path\": \"a.py\"}"}}]},
                  {"role": "tool", "tool_call_id": "c", "content": "..."},
                  {"role": "assistant", "content": "done"}],
     "tools": [{"type": "function", "function": {"name": "read_file", "parameters": {}}}]}

A conversation is rendered as episodes are: the prompt, a turn as the policy would sample it, what
follows it, the next turn. Only turns of the assistant are targets. Without `tools`, the tools are
those of the harness that the run uses.
"""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from penstock.actors.policy.chat.argument_types import parsed_arguments
from penstock.actors.policy.chat.format import (
    ChatFormat,
    ChatMessage,
    OfferedTools,
    Role,
    argument_text,
)
from penstock.infra.corpora.builder import Document
from penstock.infra.corpora.lines import existing
from penstock.infra.corpora.rows import ROW_SUFFIXES, files_of, read_rows
from penstock.messages.errors import ConfigError
from penstock.messages.rollout import ToolCall

_NUM_MESSAGES_MAX = 4096


class TraceFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Called function; its arguments are JSON text or an object, or text that was cut off."""

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


def read_traces(
    given: str, field: str, chat: ChatFormat, tools: OfferedTools, tokens_max: int
) -> Iterator[Document]:
    """Yield the documents of every conversation.

    Args:
        given: a file of rows, or a folder of such files.
        field: the setting that names it.
        chat: the policy's format.
        tools: of a conversation that names none.
        tokens_max: longest document.

    Raises:
        ConfigError: A file that is not there, a line that is no such conversation or is too long;
            the text names file and line.

    """
    for place, trace in _rows(given, field):
        try:
            yield from _documents(trace, chat, tools, tokens_max)
        except ValueError as error:
            raise ConfigError(f"{field}: {place}: {error}") from error


def trace_texts(given: str, field: str) -> Iterator[str]:
    """Yield what is said in every conversation, as plain text; errors as above."""
    for _, trace in _rows(given, field):
        yield "\n".join(message.content for message in trace.messages if message.content)


def _rows(given: str, field: str) -> Iterator[tuple[str, ChatTrace]]:
    """Yield the conversations of a file, or of a folder's `.jsonl` and `.parquet` files."""
    path = existing(given, field)
    files = [file for file in files_of(path) if file == path or file.suffix in ROW_SUFFIXES]
    if not files:
        raise ConfigError(f"{field}: {path}: expected .jsonl or .parquet files in this folder")
    for file in files:
        yield from read_rows(file, ChatTrace, field)


def _documents(
    trace: ChatTrace, chat: ChatFormat, offered: OfferedTools, tokens_max: int
) -> list[Document]:
    """Return one document, or several where the format does not keep earlier turns as they were.

    Each turn renders all that is before it: what is too long is refused at the first turn that is.

    Raises:
        ValueError: No such conversation, or one of too many tokens.

    """
    messages, unreadable = trace_messages(trace), unreadable_calls(trace)
    tools = offered
    if trace.tools is not None:
        tools = OfferedTools(schemas=[tool.function for tool in trace.tools])
    sampled: dict[int, list[int]] = {}
    found: list[Document] = []
    ids: list[int] = []
    weights: list[float] = []
    for index, message in enumerate(messages):
        if message.role is not Role.ASSISTANT:
            continue
        context = chat.render_prompt(messages[:index], tools, sampled)
        if ids and context[: len(ids)] != ids:
            found.append((ids, weights))
            ids, weights = [], []
        turn = chat.render_turn(message.content, message.calls, tools)
        weight = 0.0 if index in unreadable else 1.0
        weights += [0.0] * (len(context) - len(ids)) + [weight] * len(turn)
        ids = context + turn
        sampled[index] = turn
        if len(ids) > tokens_max:
            text = f"{len(ids)} tokens, more than trainer.midtrain.sequence_tokens"
            raise ValueError(f"{text} {tokens_max}")
    return [*found, (ids, weights)]


def trace_messages(trace: ChatTrace) -> list[ChatMessage]:
    """Return the messages of the format.

    Raises:
        ValueError: An order that no conversation has.

    """
    if not 2 <= len(trace.messages) <= _NUM_MESSAGES_MAX:
        raise ValueError(f"messages: expected 2 to {_NUM_MESSAGES_MAX}")
    messages: list[ChatMessage] = []
    num_open = 0
    for index, one in enumerate(trace.messages):
        role = Role.SYSTEM if one.role == "developer" else Role(one.role)
        where = f"messages[{index}]"
        if one.tool_calls and role is not Role.ASSISTANT:
            raise ValueError(f"{where}.tool_calls: only an assistant calls tools")
        if role is Role.TOOL:
            if not num_open:
                raise ValueError(f"{where}: a tool's result without a call before it")
            num_open -= 1
        elif num_open:
            raise ValueError(f"{where}: expected the results of {num_open} calls first")
        if role is Role.ASSISTANT:
            if index == 0 or messages[-1].role is Role.ASSISTANT:
                raise ValueError(f"{where}: expected another role before an assistant's message")
            num_open = len(one.tool_calls or ())
        calls = [_call(call.function) for call in one.tool_calls or ()]
        messages.append(ChatMessage(role=role, content=one.content or "", calls=tuple(calls)))
    if all(message.role is not Role.ASSISTANT for message in messages):
        raise ValueError("messages: expected one of an assistant")
    return messages


def unreadable_calls(trace: ChatTrace) -> set[int]:
    """Return the indices of messages with a call whose arguments are no JSON object."""
    return {
        index
        for index, message in enumerate(trace.messages)
        if not all(parsed_arguments(c.function.arguments)[1] for c in message.tool_calls or ())
    }


def _call(function: TraceFunction) -> ToolCall:
    table, _ = parsed_arguments(function.arguments)
    texts = {name: argument_text(value) for name, value in table.items()}
    return ToolCall(name=function.name, arguments=texts)
