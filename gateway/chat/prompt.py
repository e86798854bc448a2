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
from penstock.actors.policy.chat import render_turn
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.envs.harness.versions import prompt_for
from penstock.gateway.chat.schema import ChatRequest, RequestedCall, RequestMessage, Tool
from penstock.gateway.errors import ApiError, invalid
from penstock.messages.rollout import ToolCall

NUM_REMEMBERED_MAX = 4096
_ROLE_TOKENS = {
    "system": special_tokens.SYSTEM,
    "developer": special_tokens.SYSTEM,
    "user": special_tokens.USER,
    "assistant": special_tokens.ASSISTANT,
    "tool": special_tokens.TOOL,
}
_TYPES: dict[str, Any] = {
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list[Any],
    "object": dict[str, Any],
}
_Reply = tuple[str, str, str]


class _PropertySchema(msgspec.Struct, frozen=True):
    type: str


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
    request: ChatRequest, tokenizer: Tokenizer, session_id: str, memory: ReplyMemory
) -> list[int]:
    """Return the ids after which the reply is sampled.

    Raises:
        ApiError: 400, a call's arguments are not a JSON object.

    """
    ids: list[int] = []
    for index, message in enumerate(with_tools(request)):
        ids.append(tokenizer.special_id(_ROLE_TOKENS[message.role]))
        calls = _calls_of(message, index)
        remembered = None
        if message.role == "assistant":
            remembered = memory.get(session_id, message.text, calls)
        ids += remembered or render_turn(tokenizer, message.text, calls)
    ids.append(tokenizer.special_id(special_tokens.ASSISTANT))
    return ids


def with_tools(request: ChatRequest) -> list[RequestMessage]:
    """Return the messages, led by a description of the tools.

    A client that offers all tools of one version of the harness gets the very words of training.
    Else only tools without a special token of their own need a description.
    """
    offered = offered_tools(request)
    text = prompt_for(offered)
    if text is None:
        further = [tool for tool in offered.values() if not _is_built_in(tool)]
        lines = [_describe(tool) for tool in further]
        text = "Further tools:\n" + "\n".join(lines) if lines else ""
    if not text:
        return request.messages
    return [RequestMessage(role="system", content=text), *request.messages]


def offered_tools(request: ChatRequest) -> Mapping[str, Tool]:
    """Return the tools that the reply may call, by name."""
    if request.tool_choice == "none":
        return {}
    return {tool.function.name: tool for tool in request.tools or ()}


def arguments_json(call: ToolCall, tool: Tool) -> str:
    """Return a call's arguments as JSON, in the types that the tool's schema asks for."""
    properties = tool.function.parameters.properties
    typed = {
        name: _as_type(value, properties.get(name, {})) for name, value in call.arguments.items()
    }
    return msgspec.json.encode(typed).decode()


def _describe(tool: Tool) -> str:
    function = tool.function
    names = ", ".join(function.parameters.properties)
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
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise invalid(f"expected a JSON object: {error}", param) from error
    texts = {name: _as_text(value) for name, value in arguments.items()}
    return ToolCall(name=call.function.name, arguments=texts)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _as_type(value: str, schema: Any) -> Any:
    """Return `value` in the schema's type, or as it is where it does not read as that."""
    try:
        type_name = msgspec.convert(schema, _PropertySchema).type
        return msgspec.json.decode(value, type=_TYPES[type_name])
    except (ValueError, RecursionError, KeyError):
        return value


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
