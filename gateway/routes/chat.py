"""`POST /v1/chat/completions`: OpenAI's chat body and its responses.

Responses are `chat.completion` objects, or a stream of `chat.completion.chunk`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from penstock.actors.policy.chat.format import Role
from penstock.gateway.conversation import (
    NUM_CHOICES_MAX,
    NUM_MESSAGES_MAX,
    NUM_TOOLS_MAX,
    ChoiceMode,
    Delta,
    Finish,
    LiveReply,
    LiveRequest,
    Opening,
    ParsedRequest,
    RequestMessage,
    ResponseFormat,
    SamplingOptions,
    TextDelta,
    Tool,
    ToolChoice,
    call_id,
    sse,
)
from penstock.gateway.errors import ApiError, error_body, invalid
from penstock.gateway.identity import client_user
from penstock.gateway.routes.body import (
    SamplingFields,
    check_choice,
    check_sampling,
    check_tools,
    read_body,
    read_call,
)
from penstock.messages.rollout import ToolCall

_NOTHING: Mapping[str, Any] = {}
LOGPROB_MIN = -9999.0
"""Logprob that stands for minus infinity, which JSON cannot express; vLLM uses the same."""
FINISH_REASONS = {
    Finish.STOP: "stop",
    Finish.STOP_TEXT: "stop",
    Finish.LENGTH: "length",
    Finish.CALLS: "tool_calls",
}


class ChatReplyWriter:
    """Serializes the replies of one chat request, whole or as a stream of chunks."""

    def __init__(
        self, opening: Opening, *, has_logprobs: bool, has_token_ids: bool, has_usage: bool
    ) -> None:
        self._opening = opening
        self._has_logprobs = has_logprobs
        self._has_token_ids = has_token_ids
        self._has_usage = has_usage
        self._num_written: dict[int, int] = {}

    def whole(self, replies: Sequence[LiveReply]) -> bytes:
        """Return the complete response."""
        body = self._object("chat.completion", [self._choice_of(reply) for reply in replies])
        body |= self._prompt_fields() | {"usage": usage(self._opening, replies)}
        return msgspec.json.encode(body)

    def begin(self) -> Iterator[bytes]:
        """Yield the first chunk of each choice, which gives the role."""
        for index in range(self._opening.conversation.num_choices):
            choice = self._delta_choice(index, {"role": "assistant", "content": ""})
            yield self._event([choice], self._prompt_fields() if index == 0 else {})

    def deltas(self, reply: LiveReply, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """Yield one chunk per delta; the first one carries the logprobs and ids of new tokens."""
        # Tokens that end no text yet (half a character, part of a call) get a chunk of their own.
        fields = self._token_fields(reply)
        for delta in deltas:
            yield self._event([self._delta_choice(reply.index, self._delta(reply, delta)) | fields])
            fields = {}
        if fields:
            yield self._event([self._delta_choice(reply.index, {}) | fields])

    def end(self, replies: Sequence[LiveReply]) -> Iterator[bytes]:
        """Yield the finish reason of each choice, the usage if requested, and the end marker."""
        for reply in replies:
            reason = {"finish_reason": FINISH_REASONS[reply.finish]}
            yield self._event([self._delta_choice(reply.index, {}) | reason | stop_field(reply)])
        if self._has_usage:
            yield self._event([], {"usage": usage(self._opening, replies)})
        yield sse(b"[DONE]")

    def fail(self, error: ApiError) -> Iterator[bytes]:
        """Yield the error; a failed stream has no end marker."""
        yield sse(error_body(error))

    def _choice_of(self, reply: LiveReply) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
        if reply.calls:
            message["tool_calls"] = [
                self._call(reply, index, call) for index, call in enumerate(reply.calls)
            ]
        reason = FINISH_REASONS[reply.finish]
        choice = {"index": reply.index, "message": message, "finish_reason": reason}
        return choice | stop_field(reply) | self._token_fields(reply) | self._reply_id(reply)

    def _reply_id(self, reply: LiveReply) -> dict[str, str]:
        """Return the id by which feedback refers to one of several choices."""
        is_single = self._opening.conversation.num_choices == 1
        return {} if is_single else {"request_id": reply.request_id}

    def _delta(self, reply: LiveReply, delta: Delta) -> dict[str, Any]:
        if isinstance(delta, TextDelta):
            return {"content": delta.text}
        call = self._call(reply, delta.index, delta.call)
        return {"tool_calls": [{"index": delta.index} | call]}

    def _call(self, reply: LiveReply, index: int, call: ToolCall) -> dict[str, Any]:
        tool = self._opening.conversation.offered[call.name]
        return {
            "id": call_id(reply.request_id, index),
            "type": "function",
            "function": {"name": call.name, "arguments": tool.arguments_json(call)},
        }

    def _token_fields(self, reply: LiveReply) -> dict[str, Any]:
        """Return the logprobs and ids of tokens not written yet, as far as requested."""
        start = self._num_written.get(reply.index, 0)
        self._num_written[reply.index] = len(reply.token_ids)
        ids = list(reply.token_ids[start:])
        fields: dict[str, Any] = {}
        if not ids:
            return fields
        if self._has_logprobs:
            fields["logprobs"] = {"content": logprob_entries(reply, start, self._entry)}
        if self._has_token_ids:
            fields["token_ids"] = ids
        return fields

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._opening.tokenizer.decode_bytes([token_id])
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": max(LOGPROB_MIN, logprob),
            "bytes": list(data),
        }

    def _prompt_fields(self) -> dict[str, Any]:
        if not self._has_token_ids:
            return {}
        return {"prompt_token_ids": list(self._opening.context_ids)}

    def _event(self, choices: list[dict[str, Any]], fields: Mapping[str, Any] = _NOTHING) -> bytes:
        return sse(
            msgspec.json.encode(self._object("chat.completion.chunk", choices) | dict(fields))
        )

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._opening.request_id,
            "object": kind,
            "created": int(self._opening.created),
            "model": self._opening.conversation.model,
            "choices": choices,
        }

    def _delta_choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "finish_reason": None}


def logprob_entries(
    reply: LiveReply, start: int, entry: Callable[[int, float], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return one entry per token from `start` on, each with its most likely alternatives."""
    top = reply.top_logprobs
    return [
        entry(token_id, logprob)
        | {"top_logprobs": [entry(*pair) for pair in top[index]] if index < len(top) else []}
        for index, (token_id, logprob) in enumerate(
            zip(reply.token_ids, reply.logprobs, strict=True)
        )
        if index >= start
    ]


def usage(opening: Opening, replies: Sequence[LiveReply]) -> dict[str, int]:
    """Return OpenAI's usage object; the prompt counts once, whatever the number of replies."""
    num_context = len(opening.context_ids)
    num_sampled = sum(len(reply.token_ids) for reply in replies)
    return {
        "prompt_tokens": num_context,
        "completion_tokens": num_sampled,
        "total_tokens": num_context + num_sampled,
    }


def stop_field(reply: LiveReply) -> dict[str, str]:
    """Return vLLM's field `stop_reason`, the text that ended a reply; empty if none did."""
    return {"stop_reason": reply.stop_text} if reply.finish is Finish.STOP_TEXT else {}


NUM_TOP_LOGPROBS_MAX = 20
"""Maximum alternatives per token, as in OpenAI's API."""


class FunctionCall(msgspec.Struct, frozen=True):
    """A call in OpenAI's format."""

    name: str
    arguments: Any = None
    """JSON text of an object; clients also send objects, null, and text that was cut off."""


class RequestedCall(msgspec.Struct, frozen=True):
    """One entry of an assistant message's `tool_calls`."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message."""

    type: str
    text: str = ""
    refusal: str = ""


class ChatBodyMessage(msgspec.Struct, frozen=True):
    """One message of the conversation; unknown fields are ignored, since clients echo replies."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[RequestedCall] | None = None
    tool_call_id: str | None = None


class ToolFunction(msgspec.Struct, frozen=True):
    """Name and parameters of a tool."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct, frozen=True):
    """A tool that the client can run."""

    type: Literal["function"]
    function: ToolFunction


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a streamed reply."""

    include_usage: bool | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    """The function that a reply must call."""

    name: str


class NamedChoice(msgspec.Struct, frozen=True):
    """`tool_choice` by name."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(msgspec.Struct, frozen=True):
    """The field `json_schema` of `response_format`."""

    schema: dict[str, Any] | None = None


class ChatResponseFormat(msgspec.Struct, frozen=True):
    """The field `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(SamplingFields, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`: the fields that have an effect."""

    model: str
    messages: list[ChatBodyMessage]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int = 1
    tools: list[ChatTool] = []
    tool_choice: Literal["auto", "none", "required"] | NamedChoice = "auto"
    parallel_tool_calls: bool = True
    response_format: ChatResponseFormat | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    return_token_ids: bool = False
    modalities: list[str] = []
    user: str = ""
    safety_identifier: str = ""
    metadata: dict[str, str] = {}
    store: bool = True


def read_chat(body: bytes) -> ParsedRequest:
    """Parse a chat body.

    Raises:
        ApiError: 400 that names the field and what was expected.

    """
    chat, ignored = read_body(body, ChatBody)
    messages = read_messages(chat.messages)
    if not 1 <= chat.n <= NUM_CHOICES_MAX:
        raise invalid(f"expected 1 to {NUM_CHOICES_MAX}", "n")
    if not 0 <= chat.top_logprobs <= NUM_TOP_LOGPROBS_MAX:
        raise invalid(f"expected 0 to {NUM_TOP_LOGPROBS_MAX}", "top_logprobs")
    if chat.top_logprobs and not chat.logprobs:
        raise invalid("expected logprobs: true as well", "top_logprobs")
    if chat.modalities not in ([], ["text"]):
        raise invalid('expected ["text"]: this model writes only text', "modalities")
    tools = read_tools(chat.tools)
    user = chat.safety_identifier or chat.user or chat.metadata.get("user_id", "")
    conversation = LiveRequest(
        model=chat.model,
        messages=messages,
        tools=tools,
        tool_choice=_choice(chat, tools),
        allows_parallel_calls=chat.parallel_tool_calls,
        response_format=_format(chat.response_format),
        sampling=_sampling(chat),
        num_choices=chat.n,
        num_top_logprobs=chat.top_logprobs,
        is_streamed=chat.stream,
        user=user,
        session_id=client_user(user).session,
        store=chat.store,
        metadata=chat.metadata,
    )
    return ParsedRequest(conversation, partial(_writer, chat), ignored)


def read_messages(messages: Sequence[ChatBodyMessage]) -> tuple[RequestMessage, ...]:
    """Return the messages of a body.

    Raises:
        ApiError: 400 that names the field.

    """
    if not 0 < len(messages) <= NUM_MESSAGES_MAX:
        raise invalid(f"expected 1 to {NUM_MESSAGES_MAX} messages", "messages")
    return tuple(_message(message, index) for index, message in enumerate(messages))


def read_tools(given: Sequence[ChatTool]) -> tuple[Tool, ...]:
    """Return the tools of a body.

    Raises:
        ApiError: 400 that names the tool.

    """
    if len(given) > NUM_TOOLS_MAX:
        raise invalid(f"expected at most {NUM_TOOLS_MAX} tools", "tools")
    functions = [tool.function for tool in given]
    return check_tools(
        [
            Tool(
                name=function.name,
                description=function.description or "",
                parameters=function.parameters or {},
                is_strict=bool(function.strict),
            )
            for function in functions
        ]
    )


def _writer(chat: ChatBody, opening: Opening) -> ChatReplyWriter:
    return ChatReplyWriter(
        opening,
        has_logprobs=chat.logprobs,
        has_token_ids=chat.return_token_ids,
        has_usage=bool(chat.stream_options and chat.stream_options.include_usage),
    )


def _message(message: ChatBodyMessage, index: int) -> RequestMessage:
    place = f"messages[{index}]"
    # OpenAI renamed the system role for its newer models; clients send either.
    role = Role.SYSTEM if message.role == "developer" else Role(message.role)
    calls = message.tool_calls or []
    if calls and role is not Role.ASSISTANT:
        raise invalid("expected calls only in assistant messages", f"{place}.tool_calls")
    return RequestMessage(
        role=role,
        text=_text(message.content, f"{place}.content"),
        calls=tuple(
            read_call(
                call.function.name,
                call.function.arguments,
                call.id,
                f"{place}.tool_calls[{number}].function.arguments",
            )
            for number, call in enumerate(calls)
        ),
        call_id=(message.tool_call_id or "") if role is Role.TOOL else "",
        place=place,
    )


def _text(content: str | list[ContentPart] | None, place: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for index, part in enumerate(content):
        if part.type not in {"text", "refusal"}:
            text = f"expected the type text: this model cannot read {part.type!r}"
            raise invalid(text, f"{place}[{index}].type")
    return "".join(part.text or part.refusal for part in content)


def _choice(chat: ChatBody, tools: Sequence[Tool]) -> ToolChoice:
    wanted = chat.tool_choice
    if isinstance(wanted, str):
        choice = ToolChoice(mode=ChoiceMode(wanted))
    else:
        choice = ToolChoice(mode=ChoiceMode.REQUIRED, name=wanted.function.name)
    return check_choice(choice, tools)


def _format(wanted: ChatResponseFormat | None) -> ResponseFormat:
    if wanted is None or wanted.type == "text":
        return ResponseFormat()
    if wanted.type == "json_object":
        return ResponseFormat(is_json=True)
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise invalid("expected a JSON schema", "response_format.json_schema.schema")
    return ResponseFormat(is_json=True, json_schema=wanted.json_schema.schema)


def _sampling(chat: ChatBody) -> SamplingOptions:
    # `max_tokens` is the older name; errors use the one that the client sent.
    limit = chat.max_completion_tokens
    name = "max_tokens" if limit is None else "max_completion_tokens"
    wishes = chat.wishes(chat.max_tokens if limit is None else limit)
    return check_sampling(wishes, {"num_tokens_max": name, "stops": "stop"})
