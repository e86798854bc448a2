"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's body and its responses.

Responses are `message` objects, or a stream of the events that build one.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from penstock.actors.policy.chat.format import Role
from penstock.gateway.conversation import (
    NUM_MESSAGES_MAX,
    NUM_TOOLS_MAX,
    Call,
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
from penstock.gateway.errors import ANTHROPIC_PATH, ApiError, error_body, invalid
from penstock.gateway.identity import client_user
from penstock.gateway.routes.body import (
    check_choice,
    check_sampling,
    check_tools,
    read_body,
    read_call,
)
from penstock.messages.rollout import ToolCall

_STOP_REASONS = {
    Finish.STOP: "end_turn",
    Finish.STOP_TEXT: "stop_sequence",
    Finish.LENGTH: "max_tokens",
    Finish.CALLS: "tool_use",
}


class MessagesReplyWriter:
    """Serializes one message, whole or as a stream of content blocks."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._num_blocks = 0
        self._is_text_open = False

    def whole(self, replies: Sequence[LiveReply]) -> bytes:
        """Return the complete message."""
        (reply,) = replies
        content: list[dict[str, Any]] = []
        if reply.text:
            content.append({"type": "text", "text": reply.text})
        for index, call in enumerate(reply.calls):
            arguments = self._opening.conversation.offered[call.name].typed(call)
            content.append(self._call(reply, index, call) | {"input": arguments})
        body = self._message(len(reply.token_ids)) | self._stopped(reply)
        return msgspec.json.encode(body | {"content": content})

    def begin(self) -> Iterator[bytes]:
        """Yield `message_start`."""
        yield _event("message_start", message=self._message())

    def deltas(self, reply: LiveReply, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """Yield the events for new text and calls."""
        for delta in deltas:
            if isinstance(delta, TextDelta):
                # One text block stays open over many deltas; only one block may be open at a time.
                if not self._is_text_open:
                    self._is_text_open = True
                    yield self._start({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": delta.text})
            else:
                yield from self._close_text()
                yield self._start(self._call(reply, delta.index, delta.call) | {"input": {}})
                arguments = self._arguments(delta.call)
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})
                yield self._stop()

    def end(self, replies: Sequence[LiveReply]) -> Iterator[bytes]:
        """Yield `message_delta` and `message_stop`."""
        (reply,) = replies
        yield from self._close_text()
        usage = {"output_tokens": len(reply.token_ids)}
        yield _event("message_delta", delta=self._stopped(reply), usage=usage)
        yield _event("message_stop")

    def fail(self, error: ApiError) -> Iterator[bytes]:
        """Yield the event `error`."""
        yield sse(error_body(error, ANTHROPIC_PATH), event="error")

    def _start(self, block: dict[str, Any]) -> bytes:
        return _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _stop(self) -> bytes:
        index, self._num_blocks = self._num_blocks, self._num_blocks + 1
        return _event("content_block_stop", index=index)

    def _close_text(self) -> Iterator[bytes]:
        if self._is_text_open:
            self._is_text_open = False
            yield self._stop()

    def _call(self, reply: LiveReply, index: int, call: ToolCall) -> dict[str, Any]:
        return {"type": "tool_use", "id": call_id(reply.request_id, index), "name": call.name}

    def _arguments(self, call: ToolCall) -> str:
        return self._opening.conversation.offered[call.name].arguments_json(call)

    def _message(self, num_sampled: int = 0) -> dict[str, Any]:
        return {
            "id": self._opening.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._opening.conversation.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": len(self._opening.context_ids),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": num_sampled,
            },
        }

    @staticmethod
    def _stopped(reply: LiveReply) -> dict[str, Any]:
        sequence = reply.stop_text or None
        return {"stop_reason": _STOP_REASONS[reply.finish], "stop_sequence": sequence}


def _event(kind: str, **fields: Any) -> bytes:
    return sse(msgspec.json.encode({"type": kind} | fields), event=kind)


# Reasoning that another model wrote: clients echo it, and this policy was never trained on it.
_SKIPPED = frozenset({"thinking", "redacted_thinking"})


class MessagesBlock(msgspec.Struct, frozen=True):
    """A content block; which fields it has depends on its type."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: "str | list[MessagesBlock] | None" = None


class MessagesTurn(msgspec.Struct, frozen=True):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[MessagesBlock]


class MessagesTool(msgspec.Struct, frozen=True):
    """A tool; tools that Anthropic's servers would run are not offered to the policy."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessagesChoice(msgspec.Struct, frozen=True):
    """The field `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesMetadata(msgspec.Struct, frozen=True):
    """The field `metadata`."""

    user_id: str | None = None
    storage_consent: str | None = None
    training_consent: str | None = None

    @property
    def consents(self) -> dict[str, str]:
        """The consents that the request states, by name."""
        given = {
            "storage_consent": self.storage_consent,
            "training_consent": self.training_consent,
        }
        return {name: value for name, value in given.items() if value is not None}


class MessagesFormat(msgspec.Struct, frozen=True):
    """Format of the text of a reply."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class MessagesOutputConfig(msgspec.Struct, frozen=True):
    """The field `output_config`."""

    format: MessagesFormat | None = None


class MessagesBody(msgspec.Struct, frozen=True):
    """Body of `POST /v1/messages`: the fields that have an effect."""

    model: str
    messages: list[MessagesTurn]
    max_tokens: int | None = None
    system: str | list[MessagesBlock] = ""
    tools: list[MessagesTool] = []
    tool_choice: MessagesChoice = MessagesChoice(type="auto")
    stop_sequences: list[str] = []
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False
    metadata: MessagesMetadata = MessagesMetadata()
    store: bool = True
    output_format: MessagesFormat | None = None
    output_config: MessagesOutputConfig = MessagesOutputConfig()


def read_messages(body: bytes) -> ParsedRequest:
    """Parse a Messages body.

    Raises:
        ApiError: 400 that names the field and what was expected.

    """
    parsed = read_count(body)
    if parsed.conversation.sampling.num_tokens_max is None:
        raise invalid("expected the maximum length of the reply in tokens", "max_tokens")
    return parsed


def read_count(body: bytes) -> ParsedRequest:
    """Parse a body whose tokens are to be counted; unlike others, it needs no `max_tokens`.

    Raises:
        ApiError: 400 that names the field and what was expected.

    """
    read, ignored = read_body(body, MessagesBody)
    if not 0 < len(read.messages) <= NUM_MESSAGES_MAX:
        raise invalid(f"expected 1 to {NUM_MESSAGES_MAX} messages", "messages")
    if read.messages[-1].role == "assistant":
        text = "expected a user message last: continuing an assistant message is not supported"
        raise invalid(text, f"messages[{len(read.messages) - 1}]")
    tools, left_out = _tools(read.tools)
    conversation = LiveRequest(
        model=read.model,
        messages=(*_system(read.system), *_messages(read.messages)),
        tools=tools,
        tool_choice=_choice(read.tool_choice, tools),
        allows_parallel_calls=not read.tool_choice.disable_parallel_tool_use,
        response_format=_format(read),
        sampling=check_sampling(
            SamplingOptions(
                temperature=read.temperature,
                top_p=read.top_p,
                top_k=read.top_k,
                num_tokens_max=read.max_tokens,
                stops=tuple(read.stop_sequences),
            ),
            {"num_tokens_max": "max_tokens", "stops": "stop_sequences"},
        ),
        is_streamed=read.stream,
        user=read.metadata.user_id or "",
        store=read.store,
        metadata=read.metadata.consents,
        session_id=client_user(read.metadata.user_id or "").session,
    )
    return ParsedRequest(conversation, MessagesReplyWriter, [*ignored, *left_out])


def _system(system: str | list[MessagesBlock]) -> list[RequestMessage]:
    text = system if isinstance(system, str) else _text(system, "system")
    return [RequestMessage(role=Role.SYSTEM, text=text, place="system")] if text else []


def _messages(turns: Sequence[MessagesTurn]) -> list[RequestMessage]:
    messages: list[RequestMessage] = []
    for index, turn in enumerate(turns):
        place = f"messages[{index}]"
        if isinstance(turn.content, str):
            messages.append(RequestMessage(role=Role(turn.role), text=turn.content, place=place))
        elif turn.role == "assistant":
            messages.append(_assistant(turn.content, place))
        else:
            messages += _user(turn.content, Role(turn.role), place)
    return messages


def _assistant(blocks: Sequence[MessagesBlock], place: str) -> RequestMessage:
    texts: list[str] = []
    calls: list[Call] = []
    for index, block in enumerate(blocks):
        where = f"{place}.content[{index}]"
        if block.type == "text":
            texts.append(block.text or "")
        elif block.type == "tool_use":
            if not block.name or not block.id:
                raise invalid("expected id and name", where)
            calls.append(read_call(block.name, block.input, block.id, f"{where}.input"))
        elif block.type not in _SKIPPED:
            raise _unreadable(block, where)
    return RequestMessage(role=Role.ASSISTANT, text="".join(texts), calls=tuple(calls), place=place)


def _user(blocks: Sequence[MessagesBlock], role: Role, place: str) -> list[RequestMessage]:
    """Return one message per tool result, then one with the text of the turn."""
    messages: list[RequestMessage] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        where = f"{place}.content[{index}]"
        if block.type == "tool_result":
            # The chat format renders results right after their calls, so text cannot precede them.
            if texts:
                raise invalid("expected tool results before text", where)
            content = block.content
            text = content if isinstance(content, str) else _text(content or [], where)
            call_id = block.tool_use_id or ""
            messages.append(RequestMessage(role=Role.TOOL, text=text, call_id=call_id, place=where))
        elif block.type == "text":
            texts.append(block.text or "")
        else:
            raise _unreadable(block, where)
    if texts or not messages:
        messages.append(RequestMessage(role=role, text="\n".join(texts), place=place))
    return messages


def _text(blocks: Sequence[MessagesBlock], place: str) -> str:
    for index, block in enumerate(blocks):
        if block.type != "text":
            raise _unreadable(block, f"{place}.content[{index}]")
    return "\n".join(block.text or "" for block in blocks)


def _unreadable(block: MessagesBlock, place: str) -> Exception:
    return invalid(f"expected text: this model cannot read {block.type!r}", f"{place}.type")


def _tools(given: Sequence[MessagesTool]) -> tuple[tuple[Tool, ...], list[str]]:
    """Return the offered tools, and the paths of tools that are ignored."""
    if len(given) > NUM_TOOLS_MAX:
        raise invalid(f"expected at most {NUM_TOOLS_MAX} tools", "tools")
    left_out = [
        f"tools[{index}]" for index, tool in enumerate(given) if tool.type not in {None, "custom"}
    ]
    offered = [
        Tool(name=tool.name, description=tool.description or "", parameters=tool.input_schema or {})
        for tool in given
        if tool.type in {None, "custom"}
    ]
    return check_tools(offered), left_out


def _choice(wanted: MessagesChoice, tools: Sequence[Tool]) -> ToolChoice:
    if wanted.type == "tool":
        if not wanted.name:
            raise invalid("expected a name", "tool_choice.name")
        return check_choice(ToolChoice(mode=ChoiceMode.REQUIRED, name=wanted.name), tools)
    mode = {"auto": ChoiceMode.AUTO, "any": ChoiceMode.REQUIRED, "none": ChoiceMode.NONE}
    return check_choice(ToolChoice(mode=mode[wanted.type]), tools)


def _format(read: MessagesBody) -> ResponseFormat:
    # `output_format` is the name that the beta of Anthropic's API used.
    wanted = read.output_config.format or read.output_format
    return ResponseFormat(is_json=True, json_schema=wanted.schema) if wanted else ResponseFormat()
