"""`POST /v1/responses`: OpenAI's Responses body to a conversation.

Nothing is kept from one response to the next: a client sends the whole input, as Codex and the
Agents SDK do, and `previous_response_id` is refused by name.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from penstock.actors.policy.chat.format import Role
from penstock.gateway.conversation import (
    NUM_MESSAGES_MAX,
    NUM_TOOLS_MAX,
    Asked,
    Call,
    ChoiceMode,
    LiveRequest,
    ResponseFormat,
    Said,
    SamplingWishes,
    Tool,
    ToolChoice,
)
from penstock.gateway.errors import invalid
from penstock.gateway.routes.body import (
    check_choice,
    check_sampling,
    check_tools,
    read_body,
    read_call,
)
from penstock.gateway.routes.responses_reply import ResponsesReplyWriter

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal"})
_CUSTOM_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""A custom tool takes one free text."""


class ResponsesPart(msgspec.Struct, frozen=True):
    """A part of a message or of a call's output."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ResponsesItem(msgspec.Struct, frozen=True):
    """One item of the input: which fields it has depends on its type."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ResponsesPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ResponsesPart] | None = None


class ResponsesTool(msgspec.Struct, frozen=True):
    """A tool; only functions and custom tools are offered to the policy."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesNamedTool(msgspec.Struct, frozen=True):
    """`tool_choice` by name."""

    type: Literal["function", "custom"]
    name: str


class ResponsesTextFormat(msgspec.Struct, frozen=True):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None


class ResponsesText(msgspec.Struct, frozen=True):
    """`text`."""

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


def read_responses(body: bytes) -> Asked:
    """Read a Responses body.

    Raises:
        ApiError: 400 that names the field and what was expected.

    """
    read, ignored = read_body(body, ResponsesBody)
    for name in ("previous_response_id", "conversation", "prompt", "background"):
        if getattr(read, name):
            text = "nothing is kept between responses here; send the whole input instead"
            raise invalid(text, name)
    given = read.input
    items = [ResponsesItem(role="user", content=given)] if isinstance(given, str) else given
    if not 0 < len(items) <= NUM_MESSAGES_MAX:
        raise invalid(f"expected 1 to {NUM_MESSAGES_MAX} items", "input")
    tools, custom, left_out = _tools(read.tools)
    wishes = SamplingWishes(
        temperature=read.temperature, top_p=read.top_p, num_tokens_max=read.max_output_tokens
    )
    conversation = LiveRequest(
        model=read.model,
        messages=(*_instructions(read.instructions), *_messages(items)),
        tools=tools,
        tool_choice=_choice(read, tools),
        allows_parallel_calls=read.parallel_tool_calls,
        response_format=_format(read.text.format),
        sampling=check_sampling(wishes, {"num_tokens_max": "max_output_tokens"}),
        is_streamed=read.stream,
        user=read.safety_identifier or read.user or read.metadata.get("user_id", ""),
        store=read.store,
        metadata=read.metadata,
    )
    writer = partial(ResponsesReplyWriter, custom=custom, instructions=read.instructions)
    return Asked(conversation, writer, [*ignored, *left_out])


def _instructions(text: str) -> list[Said]:
    return [Said(role=Role.SYSTEM, text=text, place="instructions")] if text else []


def _messages(items: Sequence[ResponsesItem]) -> list[Said]:
    """Return messages: an assistant's text and the calls after it are one."""
    said: list[Said] = []
    for index, item in enumerate(items):
        place = f"input[{index}]"
        if item.type == "message":
            said.append(_message(item, place))
        elif item.type in {"function_call", "custom_tool_call"}:
            _append_call(said, _call(item, place), place)
        elif item.type in {"function_call_output", "custom_tool_call_output"}:
            text = _text(item.output, f"{place}.output")
            call_id = item.call_id or ""
            said.append(Said(role=Role.TOOL, text=text, call_id=call_id, place=place))
        elif item.type != "reasoning":
            raise invalid(f"items of type {item.type!r} are not supported", f"{place}.type")
    return said


def _message(item: ResponsesItem, place: str) -> Said:
    if item.role is None:
        raise invalid("expected system, developer, user or assistant", f"{place}.role")
    role = Role.SYSTEM if item.role == "developer" else Role(item.role)
    return Said(role=role, text=_text(item.content, f"{place}.content"), place=place)


def _append_call(said: list[Said], call: Call, place: str) -> None:
    if said and said[-1].role is Role.ASSISTANT:
        turn = said.pop()
        said.append(msgspec.structs.replace(turn, calls=(*turn.calls, call)))
    else:
        said.append(Said(role=Role.ASSISTANT, calls=(call,), place=place))


def _call(item: ResponsesItem, place: str) -> Call:
    if not item.name or not item.call_id:
        raise invalid("expected name and call_id", place)
    if item.type == "custom_tool_call":
        return Call(call_id=item.call_id, name=item.name, arguments={"input": item.input or ""})
    return read_call(item.name, item.arguments or "", item.call_id, f"{place}.arguments")


def _text(content: str | list[ResponsesPart] | None, place: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for index, part in enumerate(content):
        if part.type not in _TEXT_PARTS:
            text = f"expected a part of text: this model cannot read {part.type!r}"
            raise invalid(text, f"{place}[{index}].type")
    return "".join(part.text or part.refusal or "" for part in content)


def _tools(given: Sequence[ResponsesTool]) -> tuple[tuple[Tool, ...], frozenset[str], list[str]]:
    """Return the tools offered, which of them are custom, and the places of those left out."""
    if len(given) > NUM_TOOLS_MAX:
        raise invalid(f"expected at most {NUM_TOOLS_MAX} tools", "tools")
    offered: list[Tool] = []
    custom: set[str] = set()
    left_out: list[str] = []
    for index, tool in enumerate(given):
        if tool.type not in {"function", "custom"}:
            left_out.append(f"tools[{index}]")
            continue
        if not tool.name:
            raise invalid("expected a name", f"tools[{index}].name")
        parameters = tool.parameters or {}
        if tool.type == "custom":
            custom.add(tool.name)
            parameters = _CUSTOM_SCHEMA
        offered.append(
            Tool(
                name=tool.name,
                description=tool.description or "",
                parameters=parameters,
                is_strict=bool(tool.strict),
            )
        )
    return check_tools(offered), frozenset(custom), left_out


def _choice(read: ResponsesBody, tools: Sequence[Tool]) -> ToolChoice:
    wanted = read.tool_choice
    if isinstance(wanted, str):
        return check_choice(ToolChoice(mode=ChoiceMode(wanted)), tools)
    return check_choice(ToolChoice(mode=ChoiceMode.REQUIRED, name=wanted.name), tools)


def _format(wanted: ResponsesTextFormat | None) -> ResponseFormat:
    if wanted is None or wanted.type == "text":
        return ResponseFormat()
    if wanted.type == "json_schema" and wanted.schema is None:
        raise invalid("expected a JSON schema", "text.format.schema")
    return ResponseFormat(is_json=True, json_schema=wanted.schema)
