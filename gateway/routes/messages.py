"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's body to a conversation."""

from collections.abc import Sequence
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
from penstock.gateway.routes.body import check_choice, check_sampling, check_tools, read_body
from penstock.gateway.routes.messages_reply import MessagesReplyWriter

_SKIPPED = frozenset({"thinking", "redacted_thinking"})


class MessagesBlock(msgspec.Struct, frozen=True):
    """A block of a message: which fields it has depends on its type."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[MessagesBlock] | None" = None


class MessagesTurn(msgspec.Struct, frozen=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[MessagesBlock]


class MessagesTool(msgspec.Struct, frozen=True):
    """A tool; those that a service would run itself are not offered to the policy."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessagesChoice(msgspec.Struct, frozen=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesMetadata(msgspec.Struct, frozen=True):
    """`metadata`."""

    user_id: str | None = None
    storage_consent: str | None = None
    training_consent: str | None = None

    @property
    def consents(self) -> dict[str, str]:
        """What the request says of consent."""
        given = {
            "storage_consent": self.storage_consent,
            "training_consent": self.training_consent,
        }
        return {name: value for name, value in given.items() if value is not None}


class MessagesFormat(msgspec.Struct, frozen=True):
    """The form of the reply's text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class MessagesOutputConfig(msgspec.Struct, frozen=True):
    """`output_config`."""

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


def read_messages(body: bytes) -> Asked:
    """Read a Messages body.

    Raises:
        ApiError: 400 that names the field and what was expected.

    """
    asked = read_count(body)
    if asked.conversation.sampling.num_tokens_max is None:
        raise invalid("expected the most tokens that the reply may have", "max_tokens")
    return asked


def read_count(body: bytes) -> Asked:
    """Read a body whose tokens are to be counted, which need not bound the reply.

    Raises:
        ApiError: 400 that names the field and what was expected.

    """
    read, ignored = read_body(body, MessagesBody)
    if not 0 < len(read.messages) <= NUM_MESSAGES_MAX:
        raise invalid(f"expected 1 to {NUM_MESSAGES_MAX} messages", "messages")
    if read.messages[-1].role == "assistant":
        text = "expected the user's message last: a reply that was begun cannot be continued"
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
            SamplingWishes(
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
    )
    return Asked(conversation, MessagesReplyWriter, [*ignored, *left_out])


def _system(system: str | list[MessagesBlock]) -> list[Said]:
    text = system if isinstance(system, str) else _text(system, "system")
    return [Said(role=Role.SYSTEM, text=text, place="system")] if text else []


def _messages(turns: Sequence[MessagesTurn]) -> list[Said]:
    said: list[Said] = []
    for index, turn in enumerate(turns):
        place = f"messages[{index}]"
        if isinstance(turn.content, str):
            said.append(Said(role=Role(turn.role), text=turn.content, place=place))
        elif turn.role == "assistant":
            said.append(_assistant(turn.content, place))
        else:
            said += _user(turn.content, Role(turn.role), place)
    return said


def _assistant(blocks: Sequence[MessagesBlock], place: str) -> Said:
    texts: list[str] = []
    calls: list[Call] = []
    for index, block in enumerate(blocks):
        where = f"{place}.content[{index}]"
        if block.type == "text":
            texts.append(block.text or "")
        elif block.type == "tool_use":
            if not block.name or not block.id:
                raise invalid("expected id and name", where)
            calls.append(Call(call_id=block.id, name=block.name, arguments=block.input or {}))
        elif block.type not in _SKIPPED:
            raise _unreadable(block, where)
    return Said(role=Role.ASSISTANT, text="".join(texts), calls=tuple(calls), place=place)


def _user(blocks: Sequence[MessagesBlock], role: Role, place: str) -> list[Said]:
    """Return the results of calls, and the text beside them as a message of its own."""
    said: list[Said] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        where = f"{place}.content[{index}]"
        if block.type == "tool_result":
            if texts:
                raise invalid("expected results before text", where)
            content = block.content
            text = content if isinstance(content, str) else _text(content or [], where)
            call_id = block.tool_use_id or ""
            said.append(Said(role=Role.TOOL, text=text, call_id=call_id, place=where))
        elif block.type == "text":
            texts.append(block.text or "")
        else:
            raise _unreadable(block, where)
    if texts or not said:
        said.append(Said(role=role, text="\n".join(texts), place=place))
    return said


def _text(blocks: Sequence[MessagesBlock], place: str) -> str:
    for index, block in enumerate(blocks):
        if block.type != "text":
            raise _unreadable(block, f"{place}.content[{index}]")
    return "\n".join(block.text or "" for block in blocks)


def _unreadable(block: MessagesBlock, place: str) -> Exception:
    return invalid(f"expected text: this model cannot read {block.type!r}", f"{place}.type")


def _tools(given: Sequence[MessagesTool]) -> tuple[tuple[Tool, ...], list[str]]:
    """Return the tools offered, and the places of those left out."""
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
    wanted = read.output_config.format or read.output_format
    return ResponseFormat(is_json=True, json_schema=wanted.schema) if wanted else ResponseFormat()
