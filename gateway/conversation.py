"""Requests and replies in one form for all protocols; every route translates to and from it.

A route parses its body into an `ParsedRequest`. The exchange samples, and the route's `ReplyWriter`
serializes the reply in the route's wire format.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import msgspec

from penstock.actors.policy.chat.format import Role, argument_text, typed_arguments
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.gateway.errors import ApiError
from penstock.messages.rollout import ToolCall

NUM_TOOLS_MAX = 128
NUM_MESSAGES_MAX = 2048
NUM_CHOICES_MAX = 8
NUM_STOPS_MAX = 16
NUM_STOP_IDS_MAX = 1024
NUM_BIASES_MAX = 1024
STOP_CHARS_MAX = 256
INSTRUCTIONS = "instructions"
"""Place of the message made from the field `instructions` of a Responses body."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the client can run."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    """JSON schema of the arguments."""
    is_strict: bool = False
    """Whether calls must follow the schema."""

    @property
    def properties(self) -> dict[str, Any]:
        """The schemas of the arguments by name."""
        return msgspec.convert(self.parameters.get("properties") or {}, dict[str, Any])

    @property
    def schema(self) -> dict[str, Any]:
        """The function in the form in which training episodes describe their tools."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }

    def typed(self, call: ToolCall) -> dict[str, Any]:
        """Return the arguments of a call, converted to the types that the schema declares."""
        return typed_arguments(call, self.parameters)

    def arguments_json(self, call: ToolCall) -> str:
        """Return the converted arguments of a call as JSON text."""
        return msgspec.json.encode(self.typed(call)).decode()


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of an earlier turn, as the client reports it."""

    call_id: str = ""
    """Id of the call; empty if the client gives none, and results are then matched by order."""
    name: str
    arguments: dict[str, Any]
    is_malformed: bool = False
    """Whether the arguments were no JSON object; their text is then the one argument."""

    @property
    def made(self) -> ToolCall:
        """The call as the policy samples it: every argument as text."""
        texts = {name: argument_text(value) for name, value in self.arguments.items()}
        return ToolCall(name=self.name, arguments=texts)


class RequestMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the conversation."""

    role: Role
    text: str = ""
    calls: tuple[Call, ...] = ()
    """Tool calls; only assistant messages have any."""
    call_id: str = ""
    """Id of the call that a tool result answers; empty in other messages."""
    place: str = "messages"
    """Path of the message in the request body, for errors."""


class ChoiceMode(StrEnum):
    """Whether the reply must call a tool."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Constraint on the tools that the reply may or must call."""

    mode: ChoiceMode = ChoiceMode.AUTO
    name: str = ""
    """Tool that must be called; empty for any."""


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Format of the text of a reply."""

    is_json: bool = False
    json_schema: dict[str, Any] | None = None
    """Schema that the JSON must follow; None for any JSON."""


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters that the client sets; None or empty selects the service's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    num_tokens_max: int | None = None
    stops: tuple[str, ...] = ()
    """Texts that end the reply; they are cut off from it."""
    stop_token_ids: tuple[int, ...] = ()
    ignores_end: bool = False
    """Whether sampling continues past an end token."""


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a user, independent of its route."""

    model: str
    messages: tuple[RequestMessage, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """Text or token ids to continue; None where the request has messages instead."""
    prompt_place: str = "prompt"
    """Path of the prompt in the request body, for errors."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    allows_parallel_calls: bool = True
    response_format: ResponseFormat = ResponseFormat()
    sampling: SamplingOptions = SamplingOptions()
    num_choices: int = 1
    num_top_logprobs: int = 0
    """Number of alternatives to report for each sampled token."""
    is_streamed: bool = False
    user: str = ""
    """End user, as the client names them; only a pseudonym is ever stored."""
    store: bool = True
    """Whether the client allows its content to be stored."""
    metadata: dict[str, str] = {}
    session_id: str = ""
    """Session id from the body; a header takes precedence."""
    continues: str = ""
    """Id of the response whose conversation this request continues; empty for none."""
    keeps_response: bool = False
    """Whether a later request may continue after the reply by its id."""

    @property
    def offered(self) -> Mapping[str, Tool]:
        """The tools that the reply may call, by name."""
        if self.tool_choice.mode is ChoiceMode.NONE:
            return {}
        return {tool.name: tool for tool in self.tools}


class TextDelta(msgspec.Struct, frozen=True):
    """New text of a reply."""

    text: str


class CallDelta(msgspec.Struct, frozen=True):
    """One complete tool call; calls are never sent in part."""

    index: int
    call: ToolCall


Delta = TextDelta | CallDelta


class Finish(StrEnum):
    """Why a reply ended."""

    STOP = "stop"
    STOP_TEXT = "stop_text"
    """One of the client's stop texts appeared."""
    LENGTH = "length"
    CALLS = "calls"


class LiveReply(Protocol):
    """One reply, complete or still in progress."""

    index: int
    """Position among the choices of the request."""
    request_id: str
    """Id by which feedback refers to this reply."""

    @property
    def text(self) -> str:
        """Text of the reply so far."""
        ...

    @property
    def calls(self) -> Sequence[ToolCall]:
        """Tool calls so far."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """Ids of all tokens sampled so far."""
        ...

    @property
    def logprobs(self) -> Sequence[float]:
        """Behavior logprobs of `token_ids`."""
        ...

    @property
    def top_logprobs(self) -> Sequence[Sequence[tuple[int, float]]]:
        """Ids and logprobs of the most likely tokens at each position; empty unless requested."""
        ...

    @property
    def finish(self) -> Finish:
        """Why the reply ended."""
        ...

    @property
    def stop_text(self) -> str:
        """The stop text that ended the reply; empty if none did."""
        ...


class Opening(NamedTuple):
    """Facts about a reply that are known before its first token."""

    request_id: str
    created: float
    """Time of the request in Unix seconds."""
    conversation: LiveRequest
    context_ids: Sequence[int]
    tokenizer: Tokenizer


class ReplyWriter(Protocol):
    """Serializes replies in the route's wire format; each yielded item is one server-sent event."""

    def whole(self, replies: Sequence[LiveReply]) -> bytes:
        """Return the body of a response that is not streamed."""
        ...

    def begin(self) -> Iterable[bytes]:
        """Yield the first events of a stream."""
        ...

    def deltas(self, reply: LiveReply, deltas: Sequence[Delta]) -> Iterable[bytes]:
        """Yield the events for new text and calls of one reply."""
        ...

    def end(self, replies: Sequence[LiveReply]) -> Iterable[bytes]:
        """Yield the last events of a stream that is complete."""
        ...

    def fail(self, error: ApiError) -> Iterable[bytes]:
        """Yield the last events of a stream that fails."""
        ...


class ParsedRequest(NamedTuple):
    """A parsed request body."""

    conversation: LiveRequest
    writer: Callable[[Opening], ReplyWriter]
    """Makes the writer of this request's replies."""
    ignored: Sequence[str] = ()
    """Names of body fields that have no effect."""


def call_id(request_id: str, index: int) -> str:
    """Return the id of a tool call; the client's result refers to it."""
    return f"call_{request_id}_{index}"


def sse(data: bytes, event: str = "") -> bytes:
    """Return one server-sent event."""
    head = b"event: " + event.encode() + b"\n" if event else b""
    return head + b"data: " + data + b"\n\n"
