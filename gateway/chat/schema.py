"""What a chat request may hold. What is not supported is refused by name, never ignored."""

import re
from typing import Any, Literal, TypeVar

import msgspec

from penstock.gateway.errors import ApiError, invalid
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.task import TEMPERATURE_MIN, TOP_P_MIN

T = TypeVar("T")
NUM_TOOLS_MAX = 128
NUM_MESSAGES_MAX = 2048
_PATH = re.compile(r" - at `(?:\$\.?)?([^`]*)`")
_UNKNOWN = re.compile(r"unknown field `([^`]+)`")
_MISSING = re.compile(r"missing required field `([^`]+)`")


class FunctionCall(msgspec.Struct, frozen=True):
    """A call as OpenAI writes it: arguments are JSON text."""

    name: str
    arguments: str = "{}"


class RequestedCall(msgspec.Struct, frozen=True):
    """One entry of an assistant message's `tool_calls`."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class TextPart(msgspec.Struct, frozen=True):
    """A part of a message; only text is read."""

    type: Literal["text"]
    text: str


class RequestMessage(msgspec.Struct, frozen=True):
    """One message of the conversation; fields that clients echo back are let through."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[RequestedCall] | None = None
    tool_call_id: str = ""

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ToolFunction(msgspec.Struct, frozen=True):
    """Name and parameters of a tool."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    """A JSON schema; only the names and types of its properties are read here."""
    strict: bool | None = None

    @property
    def properties(self) -> dict[str, Any]:
        """The schemas of the arguments by name."""
        return msgspec.convert(self.parameters.get("properties", {}), dict[str, Any])


class Tool(msgspec.Struct, frozen=True):
    """A tool that the client can run."""

    type: Literal["function"]
    function: ToolFunction


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a streamed reply."""

    include_usage: bool = False


class ChatRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/chat/completions`."""

    model: str
    messages: list[RequestMessage]
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool = True
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool = False
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None

    @property
    def end_user(self) -> str:
        """The end user that the request names, by whichever field; empty where it names none."""
        return self.safety_identifier or self.user or (self.metadata or {}).get("user_id", "")


def parse_chat(body: bytes) -> ChatRequest:
    """Decode and check a chat request.

    Raises:
        ApiError: 400 that names the field and what was expected.

    """
    request = decode_body(body, ChatRequest)
    if not 0 < len(request.messages) <= NUM_MESSAGES_MAX:
        raise invalid(f"expected 1 to {NUM_MESSAGES_MAX} messages", "messages")
    if len(request.tools or ()) > NUM_TOOLS_MAX:
        raise invalid(f"expected at most {NUM_TOOLS_MAX} tools", "tools")
    for index, tool in enumerate(request.tools or ()):
        if not isinstance(tool.function.parameters.get("properties", {}), dict):
            where = f"tools[{index}].function.parameters.properties"
            raise invalid("expected an object", where)
    if request.n not in {None, 1}:
        raise invalid("only one choice per request is supported", "n")
    _check_penalties(request)
    _check_sampling(request)
    return request


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode JSON into a struct.

    Raises:
        ApiError: 400 that names the field.

    """
    try:
        return parse_json(body, kind, "body")
    except CodecError as error:
        if isinstance(error.__cause__, msgspec.ValidationError):
            raise _as_api_error(error.__cause__) from error
        raise ApiError(400, "invalid_json", f"the body is not JSON: {error}") from error


def _check_penalties(request: ChatRequest) -> None:
    for name in ("presence_penalty", "frequency_penalty", "top_logprobs"):
        if getattr(request, name):
            raise invalid("not supported; leave it out or give 0", name)


def _check_sampling(request: ChatRequest) -> None:
    temperature, top_p = request.temperature, request.top_p
    if temperature and not TEMPERATURE_MIN <= temperature <= 2:
        raise invalid(f"expected 0, or a number from {TEMPERATURE_MIN:g} to 2", "temperature")
    if top_p is not None and not TOP_P_MIN <= top_p <= 1:
        raise invalid(f"expected a number from {TOP_P_MIN:g} to 1", "top_p")
    for name in ("max_tokens", "max_completion_tokens"):
        limit = getattr(request, name)
        if limit is not None and limit < 1:
            raise invalid("expected at least 1", name)
    if request.seed is not None and not -(2**63) <= request.seed < 2**63:
        raise invalid("expected an integer of 64 bits", "seed")


def _as_api_error(error: msgspec.ValidationError) -> ApiError:
    text = str(error)
    place = _PATH.search(text)
    path = place.group(1) if place else ""
    named = _UNKNOWN.search(text) or _MISSING.search(text)
    if named:
        path = f"{path}.{named.group(1)}" if path else named.group(1)
    return invalid(_PATH.sub("", text), path or None)
