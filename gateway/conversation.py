"""What a client asks for, in one form whatever the protocol: every route translates to and from it.

A route reads its body into an `Asked`; the exchange samples, and the route's `ReplyWriter` says
the reply in its own words.
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


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the client can run."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    """A JSON schema."""
    is_strict: bool = False
    """Whether calls must follow the schema."""

    @property
    def properties(self) -> dict[str, Any]:
        """The schemas of the arguments by name."""
        return msgspec.convert(self.parameters.get("properties") or {}, dict[str, Any])

    @property
    def schema(self) -> dict[str, Any]:
        """The function as episodes of training describe theirs."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }

    def typed(self, call: ToolCall) -> dict[str, Any]:
        """Return a call's arguments in the types that the schema asks for."""
        return typed_arguments(call, self.properties)

    def arguments_json(self, call: ToolCall) -> str:
        """Return a call's typed arguments as JSON."""
        return msgspec.json.encode(self.typed(call)).decode()


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the client says an earlier turn made."""

    call_id: str = ""
    """Empty where the client names none: its results are then matched by their order."""
    name: str
    arguments: dict[str, Any]

    @property
    def made(self) -> ToolCall:
        """The call as the policy makes it: every argument a text."""
        texts = {name: argument_text(value) for name, value in self.arguments.items()}
        return ToolCall(name=self.name, arguments=texts)


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the conversation."""

    role: Role
    text: str = ""
    calls: tuple[Call, ...] = ()
    """Of an assistant."""
    call_id: str = ""
    """Of a tool's result: the call that it answers."""
    place: str = "messages"
    """Where the body has it, for errors."""


class ChoiceMode(StrEnum):
    """Whether the reply must call a tool."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the offered tools the reply may or must call."""

    mode: ChoiceMode = ChoiceMode.AUTO
    name: str = ""
    """Required, and of this name; empty for any."""


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of a reply's text."""

    is_json: bool = False
    json_schema: dict[str, Any] | None = None
    """Of the JSON; None for any."""


class SamplingWishes(msgspec.Struct, frozen=True, kw_only=True):
    """How the client wants tokens drawn; None and empty leave it to the service."""

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
    """Texts that end the reply and are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    ignores_end: bool = False
    """Whether an end token does not end the reply."""


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a user, whatever route it came by."""

    model: str
    messages: tuple[Said, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """What to continue instead of answering messages: a text, or token ids as they are."""
    prompt_place: str = "prompt"
    """Where the body has it, for errors."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    allows_parallel_calls: bool = True
    response_format: ResponseFormat = ResponseFormat()
    sampling: SamplingWishes = SamplingWishes()
    num_choices: int = 1
    num_top_logprobs: int = 0
    """Alternatives reported beside each sampled token."""
    is_streamed: bool = False
    user: str = ""
    """The end user as the client names them: never stored, see `messages/feedback.py`."""
    store: bool = True
    """Whether the client lets the reply's content be stored."""
    metadata: dict[str, str] = {}
    session_id: str = ""
    """Of the body; a header comes first."""

    @property
    def offered(self) -> Mapping[str, Tool]:
        """The tools that the reply may call, by name."""
        if self.tool_choice.mode is ChoiceMode.NONE:
            return {}
        return {tool.name: tool for tool in self.tools}


class TextDelta(msgspec.Struct, frozen=True):
    """More content."""

    text: str


class CallDelta(msgspec.Struct, frozen=True):
    """One whole call."""

    index: int
    call: ToolCall


Delta = TextDelta | CallDelta


class Finish(StrEnum):
    """Why a reply ended."""

    STOP = "stop"
    STOP_TEXT = "stop_text"
    """One of the client's stop texts."""
    LENGTH = "length"
    CALLS = "calls"


class Replied(Protocol):
    """One reply, as far as it has come."""

    index: int
    """Among the request's choices."""
    request_id: str
    """Feedback on this reply names it."""

    @property
    def text(self) -> str:
        """The content."""
        ...

    @property
    def calls(self) -> Sequence[ToolCall]:
        """The calls."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """All that was sampled."""
        ...

    @property
    def logprobs(self) -> Sequence[float]:
        """Behavior logprobs of `token_ids`."""
        ...

    @property
    def top_logprobs(self) -> Sequence[Sequence[tuple[int, float]]]:
        """Ids and logprobs of the likeliest tokens at each position, where they were asked for."""
        ...

    @property
    def finish(self) -> Finish:
        """Why it ended."""
        ...

    @property
    def stop_text(self) -> str:
        """The stop text that ended it, if one did."""
        ...


class Opening(NamedTuple):
    """What is known of a reply before its first token."""

    request_id: str
    created: float
    """Unix seconds."""
    conversation: LiveRequest
    context_ids: Sequence[int]
    tokenizer: Tokenizer


class ReplyWriter(Protocol):
    """Says replies in a protocol's words; what it yields are whole server-sent events."""

    def whole(self, replies: Sequence[Replied]) -> bytes:
        """Return the body of a reply that is not streamed."""
        ...

    def begin(self) -> Iterable[bytes]:
        """Yield the first events."""
        ...

    def deltas(self, reply: Replied, deltas: Sequence[Delta]) -> Iterable[bytes]:
        """Yield what is new of one reply."""
        ...

    def end(self, replies: Sequence[Replied]) -> Iterable[bytes]:
        """Yield the last events."""
        ...

    def fail(self, error: ApiError) -> Iterable[bytes]:
        """Yield the last events of a stream that breaks off."""
        ...


class Asked(NamedTuple):
    """A body that was read."""

    conversation: LiveRequest
    writer: Callable[[Opening], ReplyWriter]
    ignored: Sequence[str] = ()
    """Fields of the body that have no effect here."""


def call_id(request_id: str, index: int) -> str:
    """Return the id under which clients answer a call."""
    return f"call_{request_id}_{index}"


def sse(data: bytes, event: str = "") -> bytes:
    """Return one server-sent event."""
    head = b"event: " + event.encode() + b"\n" if event else b""
    return head + b"data: " + data + b"\n\n"
