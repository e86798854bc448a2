"""`POST /v1/responses`: OpenAI's Responses body and its responses.

A client sends the whole input, as Codex and the Agents SDK do, or continues a recent response by
`previous_response_id`. Fields for other stored state, such as `conversation`, are refused by name.
Responses are `response` objects, or a stream of the events that build one.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.actors.policy.chat.format import Role
from penstock.gateway.conversation import (
    INSTRUCTIONS,
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
from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.identity import client_user
from penstock.gateway.routes.body import (
    check_choice,
    check_sampling,
    check_tools,
    read_body,
    read_call,
)
from penstock.messages.rollout import ToolCall


class ResponsesReplyWriter:
    """Serializes one response; output items come in the order in which they were sampled."""

    def __init__(
        self, opening: Opening, *, tools: "OfferedResponsesTools", instructions: str
    ) -> None:
        """Begin a response.

        Args:
            opening: Facts known before the first token.
            tools: Tools as the client named them.
            instructions: Instructions of the request, which the response repeats.

        """
        self._opening = opening
        self._tools = tools
        self._instructions = instructions
        self._items: list[dict[str, Any]] = []
        self._text: str | None = None
        """Text of the message item that is open; None if no item is open."""
        self._num_events = 0

    def whole(self, replies: Sequence[LiveReply]) -> bytes:
        """Return the complete response."""
        (reply,) = replies
        if reply.text or not reply.calls:
            self._items.append(self._message(reply.text, "completed"))
        self._items += [self._call(reply, i, call) for i, call in enumerate(reply.calls)]
        return msgspec.json.encode(self._ended(reply))

    def begin(self) -> Iterator[bytes]:
        """Yield `response.created` and `response.in_progress`."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def deltas(self, reply: LiveReply, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """Yield the events for new text and calls."""
        for delta in deltas:
            if isinstance(delta, TextDelta):
                yield from self._more_text(delta.text)
            else:
                yield from self._close_text()
                yield from self._whole_call(self._call(reply, delta.index, delta.call))

    def end(self, replies: Sequence[LiveReply]) -> Iterator[bytes]:
        """Yield `response.completed` or `response.incomplete`."""
        (reply,) = replies
        # As in `whole`: an empty reply still has one message item.
        if not self._items and self._text is None:
            yield from self._more_text("")
        yield from self._close_text()
        ended = self._ended(reply)
        yield self._event(f"response.{ended['status']}", response=ended)

    def fail(self, error: ApiError) -> Iterator[bytes]:
        """Yield `response.failed`."""
        fault = {"code": error.code, "message": error.message}
        yield self._event("response.failed", response=self._response("failed") | {"error": fault})

    def _more_text(self, text: str) -> Iterator[bytes]:
        place = {"item_id": self._item_id("msg"), "output_index": len(self._items)}
        # The API requires an item and a part to be added before the first delta refers to them.
        if self._text is None:
            self._text = ""
            item = self._message("", "in_progress")
            item["content"] = []
            added = "response.output_item.added"
            yield self._event(added, output_index=len(self._items), item=item)
            part = _text_part("")
            yield self._event("response.content_part.added", **place, content_index=0, part=part)
        self._text += text
        if text:
            yield self._event(
                "response.output_text.delta", **place, content_index=0, delta=text, logprobs=[]
            )

    def _close_text(self) -> Iterator[bytes]:
        if self._text is None:
            return
        text, self._text = self._text, None
        place = {"item_id": self._item_id("msg"), "output_index": len(self._items)}
        yield self._event(
            "response.output_text.done", **place, content_index=0, text=text, logprobs=[]
        )
        part = _text_part(text)
        yield self._event("response.content_part.done", **place, content_index=0, part=part)
        yield self._item_done(self._message(text, "completed"))

    def _whole_call(self, item: dict[str, Any]) -> Iterator[bytes]:
        is_custom = item["type"] == "custom_tool_call"
        field = "input" if is_custom else "arguments"
        kind = "custom_tool_call_input" if is_custom else "function_call_arguments"
        place = {"item_id": item["id"], "output_index": len(self._items)}
        begun = item | {field: "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=len(self._items), item=begun)
        yield self._event(f"response.{kind}.delta", **place, delta=item[field])
        yield self._event(
            f"response.{kind}.done", **place, name=item["name"], **{field: item[field]}
        )
        yield self._item_done(item)

    def _item_done(self, item: dict[str, Any]) -> bytes:
        index = len(self._items)
        self._items.append(item)
        return self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        body = {"type": kind, "sequence_number": number} | fields
        return sse(msgspec.json.encode(body), event=kind)

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._opening.request_id}_{len(self._items)}"

    def _message(self, text: str, status: str) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._item_id("msg"),
            "status": status,
            "role": "assistant",
            "content": [_text_part(text)],
        }

    def _call(self, reply: LiveReply, index: int, call: ToolCall) -> dict[str, Any]:
        names = {"call_id": call_id(reply.request_id, index), "name": call.name}
        if call.name in self._tools.namespaced:
            names["namespace"], names["name"] = self._tools.namespaced[call.name]
        if call.name in self._tools.custom:
            text = call.arguments.get("input", "")
            item = {"type": "custom_tool_call", "id": self._item_id("ctc"), "input": text}
        else:
            arguments = self._opening.conversation.offered[call.name].arguments_json(call)
            item = {"type": "function_call", "id": self._item_id("fc"), "arguments": arguments}
        return item | names | {"status": "completed"}

    def _ended(self, reply: LiveReply) -> dict[str, Any]:
        num_context, num_sampled = len(self._opening.context_ids), len(reply.token_ids)
        is_cut = reply.finish is Finish.LENGTH
        return self._response("incomplete" if is_cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": num_context,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": num_sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_context + num_sampled,
            },
        }

    def _response(self, status: str) -> dict[str, Any]:
        asked = self._opening.conversation
        choice, wishes = asked.tool_choice, asked.sampling
        is_named = choice.mode is ChoiceMode.REQUIRED and choice.name
        return {
            "id": self._opening.request_id,
            "object": "response",
            "created_at": int(self._opening.created),
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": self._instructions or None,
            "max_output_tokens": wishes.num_tokens_max,
            "metadata": asked.metadata,
            "model": asked.model,
            "output": list(self._items),
            "parallel_tool_calls": asked.allows_parallel_calls,
            "previous_response_id": asked.continues or None,
            "reasoning": {"effort": None, "summary": None},
            "store": asked.store,
            "temperature": 1.0 if wishes.temperature is None else wishes.temperature,
            "text": {
                "format": {"type": "json_object" if asked.response_format.is_json else "text"}
            },
            "tool_choice": {"type": "function", "name": choice.name} if is_named else choice.mode,
            "tools": [{"type": "function", "strict": None} | tool.schema for tool in asked.tools],
            "top_p": 1.0 if wishes.top_p is None else wishes.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


# Assistant messages come back with the part types of responses.
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal"})
_CUSTOM_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""Schema of a custom tool, which takes one free text."""


class ResponsesPart(msgspec.Struct, frozen=True):
    """A part of a message or of a tool output."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ResponsesItem(msgspec.Struct, frozen=True):
    """One item of the input; which fields it has depends on its type."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ResponsesPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: str | None = None
    output: str | list[ResponsesPart] | None = None


class ResponsesTool(msgspec.Struct, frozen=True):
    """A tool or a namespace of tools; only functions and custom tools are offered to the policy."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: "list[ResponsesTool] | None" = None
    """The tools of a namespace."""


class ResponsesNamedTool(msgspec.Struct, frozen=True):
    """`tool_choice` by name."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class ResponsesTextFormat(msgspec.Struct, frozen=True):
    """The field `text.format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None


class ResponsesText(msgspec.Struct, frozen=True):
    """The field `text`."""

    format: ResponsesTextFormat | None = None


class ResponsesBody(msgspec.Struct, frozen=True):
    """Body of `POST /v1/responses`: the fields that have an effect or are refused."""

    model: str
    input: str | list[ResponsesItem]
    instructions: str = ""
    tools: list[ResponsesTool] = []
    tool_choice: Literal["auto", "none", "required"] | ResponsesNamedTool = "auto"
    parallel_tool_calls: bool = True
    text: ResponsesText = ResponsesText()
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    stream: bool = False
    user: str = ""
    safety_identifier: str = ""
    metadata: dict[str, str] = {}
    store: bool = True
    previous_response_id: str = ""
    conversation: Any = None
    prompt: Any = None
    background: bool = False


def read_responses(body: bytes) -> ParsedRequest:
    """Parse a Responses body.

    Raises:
        ApiError: 400 that names the field and what was expected.

    """
    read, ignored = read_body(body, ResponsesBody)
    for name in ("conversation", "prompt", "background"):
        if getattr(read, name):
            raise invalid("not supported: send the whole input, or previous_response_id", name)
    given = read.input
    items = [ResponsesItem(role="user", content=given)] if isinstance(given, str) else given
    if not 0 < len(items) <= NUM_MESSAGES_MAX:
        raise invalid(f"expected 1 to {NUM_MESSAGES_MAX} items", "input")
    tools = _tools(read.tools)
    wishes = SamplingOptions(
        temperature=read.temperature, top_p=read.top_p, num_tokens_max=read.max_output_tokens
    )
    user = read.safety_identifier or read.user or read.metadata.get("user_id", "")
    conversation = LiveRequest(
        model=read.model,
        messages=(*_instructions(read.instructions), *_messages(items)),
        tools=tools.offered,
        tool_choice=_choice(read, tools),
        allows_parallel_calls=read.parallel_tool_calls,
        response_format=_format(read.text.format),
        sampling=check_sampling(wishes, {"num_tokens_max": "max_output_tokens"}),
        is_streamed=read.stream,
        user=user,
        session_id=client_user(user).session,
        store=read.store,
        metadata=read.metadata,
        continues=read.previous_response_id,
        keeps_response=read.store,
    )
    writer = partial(ResponsesReplyWriter, tools=tools, instructions=read.instructions)
    return ParsedRequest(conversation, writer, [*ignored, *tools.left_out])


def _instructions(text: str) -> list[RequestMessage]:
    return [RequestMessage(role=Role.SYSTEM, text=text, place=INSTRUCTIONS)] if text else []


def _messages(items: Sequence[ResponsesItem]) -> list[RequestMessage]:
    """Return the messages of an input; calls join the assistant message before them."""
    messages: list[RequestMessage] = []
    for index, item in enumerate(items):
        place = f"input[{index}]"
        if item.type == "message":
            messages.append(_message(item, place))
        elif item.type in {"function_call", "custom_tool_call"}:
            _append_call(messages, _call(item, place), place)
        elif item.type in {"function_call_output", "custom_tool_call_output"}:
            text = _text(item.output, f"{place}.output")
            call_id = item.call_id or ""
            messages.append(RequestMessage(role=Role.TOOL, text=text, call_id=call_id, place=place))
        # Reasoning items are another model's: clients echo them, and this policy has none.
        elif item.type != "reasoning":
            raise invalid(f"items of type {item.type!r} are not supported", f"{place}.type")
    return messages


def _message(item: ResponsesItem, place: str) -> RequestMessage:
    if item.role is None:
        raise invalid("expected system, developer, user or assistant", f"{place}.role")
    role = Role.SYSTEM if item.role == "developer" else Role(item.role)
    return RequestMessage(role=role, text=_text(item.content, f"{place}.content"), place=place)


def _append_call(messages: list[RequestMessage], call: Call, place: str) -> None:
    if messages and messages[-1].role is Role.ASSISTANT:
        turn = messages.pop()
        messages.append(msgspec.structs.replace(turn, calls=(*turn.calls, call)))
    else:
        messages.append(RequestMessage(role=Role.ASSISTANT, calls=(call,), place=place))


def _call(item: ResponsesItem, place: str) -> Call:
    if not item.name or not item.call_id:
        raise invalid("expected name and call_id", place)
    name = _flat_name(item.namespace, item.name)
    if item.type == "custom_tool_call":
        return Call(call_id=item.call_id, name=name, arguments={"input": item.input or ""})
    return read_call(name, item.arguments, item.call_id, f"{place}.arguments")


def _text(content: str | list[ResponsesPart] | None, place: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for index, part in enumerate(content):
        if part.type not in _TEXT_PARTS:
            text = f"expected text: this model cannot read {part.type!r}"
            raise invalid(text, f"{place}[{index}].type")
    return "".join(part.text or part.refusal or "" for part in content)


class OfferedResponsesTools(NamedTuple):
    """The tools of a request; the policy knows each tool of a namespace by one joined name."""

    offered: tuple[Tool, ...]
    custom: frozenset[str]
    """Names of tools that take free text instead of JSON."""
    namespaced: Mapping[str, tuple[str, str]]
    """Joined name -> namespace and name."""
    left_out: Sequence[str]
    """Paths of the tools that are not offered."""


def _flat_name(namespace: str | None, name: str) -> str:
    """Return the name by which the policy knows a tool."""
    if not namespace:
        return name
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def _tools(given: Sequence[ResponsesTool]) -> OfferedResponsesTools:
    """Return the offered tools, those in namespaces included.

    Raises:
        ApiError: 400 that names the tool.

    """
    placed: list[tuple[str, str | None, ResponsesTool]] = []
    for index, tool in enumerate(given):
        place = f"tools[{index}]"
        if tool.type == "namespace":
            inner = enumerate(tool.tools or ())
            placed += [(f"{place}.tools[{n}]", tool.name or "", one) for n, one in inner]
        else:
            placed.append((place, None, tool))
    if len(placed) > NUM_TOOLS_MAX:
        raise invalid(f"expected at most {NUM_TOOLS_MAX} tools", "tools")
    kept = [one for one in placed if one[2].type in {"function", "custom"}]
    offered: list[Tool] = []
    namespaced: dict[str, tuple[str, str]] = {}
    for place, namespace, tool in kept:
        if not tool.name:
            raise invalid("expected a name", f"{place}.name")
        if namespace == "":
            raise invalid("expected a name", f"{place.partition('.')[0]}.name")
        name = _flat_name(namespace, tool.name)
        if namespace:
            namespaced[name] = (namespace, tool.name)
        is_custom = tool.type == "custom"
        offered.append(
            Tool(
                name=name,
                description=tool.description or "",
                parameters=_CUSTOM_SCHEMA if is_custom else tool.parameters or {},
                is_strict=bool(tool.strict),
            )
        )
    left_out = [place for place, _, tool in placed if tool.type not in {"function", "custom"}]
    custom = frozenset(
        _flat_name(ns, one.name or "") for _, ns, one in kept if one.type == "custom"
    )
    return OfferedResponsesTools(check_tools(offered), custom, namespaced, left_out)


def _choice(read: ResponsesBody, tools: OfferedResponsesTools) -> ToolChoice:
    wanted = read.tool_choice
    if isinstance(wanted, str):
        return check_choice(ToolChoice(mode=ChoiceMode(wanted)), tools.offered)
    name = _flat_name(wanted.namespace, wanted.name)
    # Clients may name a tool without its namespace where only one has that name.
    if all(tool.name != name for tool in tools.offered):
        found = [flat for flat, (_, short) in tools.namespaced.items() if short == wanted.name]
        name = found[0] if len(found) == 1 and not wanted.namespace else name
    return check_choice(ToolChoice(mode=ChoiceMode.REQUIRED, name=name), tools.offered)


def _format(wanted: ResponsesTextFormat | None) -> ResponseFormat:
    if wanted is None or wanted.type == "text":
        return ResponseFormat()
    if wanted.type == "json_schema" and wanted.schema is None:
        raise invalid("expected a JSON schema", "text.format.schema")
    return ResponseFormat(is_json=True, json_schema=wanted.schema)
