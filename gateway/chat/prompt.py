"""From OpenAI messages to the policy's context.

What the policy sampled is not tokenized again where it can be helped: the ids of its replies are
remembered, and a conversation that comes back holds them as they were sampled. So a session's next
turn begins with exactly the tokens of the last one, and its KV prefix is still good.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.actors.policy import special_tokens
from penstock.actors.policy.chat.format import (
    ChatFormat,
    ChatMessage,
    OfferedTools,
    Role,
    argument_text,
    typed_arguments,
)
from penstock.envs.harness.versions import prompt_for
from penstock.gateway.chat.schema import ChatRequest, RequestedCall, RequestMessage, Tool
from penstock.gateway.errors import ApiError, invalid
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.rollout import ToolCall

NUM_REMEMBERED_MAX = 4096
_Reply = tuple[str, str, str]


class ReplyMemory:
    """The sampled ids of recent replies, by session, content and calls."""

    def __init__(self, num_max: int = NUM_REMEMBERED_MAX) -> None:
        self._num_max = num_max
        self._ids: OrderedDict[_Reply, list[int]] = OrderedDict()

    def put(
        self, session_id: str, text: str, calls: Sequence[ToolCall], token_ids: list[int]
    ) -> None:
        """Remember one reply; the oldest is forgotten."""
        key = _reply_key(session_id, text, calls)
        self._ids[key] = token_ids
        self._ids.move_to_end(key)
        if len(self._ids) > self._num_max:
            self._ids.popitem(last=False)

    def get(self, session_id: str, text: str, calls: Sequence[ToolCall]) -> list[int] | None:
        """Return the ids of a reply, or None."""
        return self._ids.get(_reply_key(session_id, text, calls))


def render_context(
    request: ChatRequest, chat_format: ChatFormat, session_id: str, memory: ReplyMemory
) -> list[int]:
    """Return the ids after which the reply is sampled.

    Raises:
        ApiError: 400, a call's arguments are not a JSON object.

    """
    messages: list[ChatMessage] = []
    sampled: dict[int, list[int]] = {}
    for index, message in enumerate(request.messages):
        role = Role.SYSTEM if message.role == "developer" else Role(message.role)
        calls = _calls_of(message, index)
        messages.append(ChatMessage(role=role, content=message.text, calls=calls))
        if role is Role.ASSISTANT and (ids := memory.get(session_id, message.text, calls)):
            sampled[index] = ids
    return chat_format.render_prompt(messages, told_tools(request), sampled)


def told_tools(request: ChatRequest) -> OfferedTools:
    """Return what a prompt holds of the tools.

    A client that offers all tools of one version of the harness gets the very words of training.
    Else only tools without a special token of their own need a description.
    """
    offered = offered_tools(request)
    text = prompt_for(offered)
    if text is None:
        further = [tool for tool in offered.values() if not _is_built_in(tool)]
        lines = [_describe(tool) for tool in further]
        text = "Further tools:\n" + "\n".join(lines) if lines else ""
    return OfferedTools(words=text, schemas=[_schema(tool) for tool in offered.values()])


def offered_tools(request: ChatRequest) -> Mapping[str, Tool]:
    """Return the tools that the reply may call, by name."""
    if request.tool_choice == "none":
        return {}
    return {tool.function.name: tool for tool in request.tools or ()}


def arguments_json(call: ToolCall, tool: Tool) -> str:
    """Return a call's arguments as JSON, in the types that the tool's schema asks for."""
    return msgspec.json.encode(typed_arguments(call, tool.function.properties)).decode()


def _schema(tool: Tool) -> dict[str, Any]:
    """Return a function as episodes of training describe theirs."""
    function = tool.function
    return {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
    }


def _describe(tool: Tool) -> str:
    function = tool.function
    names = ", ".join(function.properties)
    return f"{function.name}({names}): {function.description}"


def _is_built_in(tool: Tool) -> bool:
    return tool.function.name in special_tokens.TOOL_NAMES


def _calls_of(message: RequestMessage, index: int) -> tuple[ToolCall, ...]:
    calls = message.tool_calls or ()
    return tuple(
        _parse_call(call, f"messages[{index}].tool_calls[{n}].function.arguments")
        for n, call in enumerate(calls)
    )


def _parse_call(call: RequestedCall, param: str) -> ToolCall:
    try:
        arguments = parse_json(call.function.arguments or "{}", dict[str, Any], "arguments")
    except CodecError as error:
        raise invalid(f"expected a JSON object: {error}", param) from error
    texts = {name: argument_text(value) for name, value in arguments.items()}
    return ToolCall(name=call.function.name, arguments=texts)


def _reply_key(session_id: str, text: str, calls: Sequence[ToolCall]) -> _Reply:
    plain = [(call.name, sorted(call.arguments.items())) for call in calls]
    return session_id, text, msgspec.json.encode(plain).decode()


def check_length(num_context: int, num_reply: int, num_max: int) -> None:
    """Refuse a prompt that leaves no room for the reply.

    Raises:
        ApiError: 400.

    """
    if num_context + num_reply > num_max:
        text = (
            f"the prompt has {num_context} tokens and the reply may have {num_reply}, "
            f"together more than the context of {num_max}"
        )
        raise ApiError(400, "context_length_exceeded", text, "messages")
