"""A chat completion that comes as server-sent events: deltas of text, and of calls."""

from collections.abc import AsyncGenerator

import aiohttp
import msgspec

from penstock.messages.errors import CodecError, PenstockError
from penstock.messages.reading.parsing import parse_json

REPLY_BYTES_MAX = 8 << 20
NUM_CALLS_MAX = 256
_PREFIX = b"data:"
_END = b"[DONE]"


class AgentError(PenstockError, ConnectionError):
    """The model's endpoint refused or did not answer; the text has its words."""


class ReplyFunction(msgspec.Struct):
    """What a call is of; the arguments are JSON as the model wrote it."""

    name: str = ""
    arguments: str = ""


class ReplyCall(msgspec.Struct):
    """A call in a reply, or a delta of one."""

    function: ReplyFunction = msgspec.field(default_factory=ReplyFunction)
    id: str = ""
    type: str = "function"


class ChatReply(msgspec.Struct):
    """An assistant's message."""

    content: str | None = None
    tool_calls: list[ReplyCall] | None = None


class _FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _FunctionDelta | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_CallDelta] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


class StreamedReply:
    """A message, put together from its events."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._calls: dict[int, ReplyCall] = {}

    def add(self, event: bytes) -> str:
        """Take an event; return the text that it adds.

        Raises:
            AgentError: It is no event of a reply, or the service's error.

        """
        try:
            found = parse_json(event, _Event, "event")
        except CodecError as error:
            raise AgentError(f"event of a stream: {error}") from error
        if found.error is not None:
            raise AgentError(f"the service failed: {found.error.message}")
        delta = found.choices[0].delta if found.choices else None
        if delta is None:
            return ""
        for call in delta.tool_calls or []:
            self._add_call(call)
        self._texts.append(delta.content or "")
        return delta.content or ""

    def message(self) -> ChatReply:
        """Return the whole message."""
        calls = [self._calls[index] for index in sorted(self._calls)]
        return ChatReply(content="".join(self._texts) or None, tool_calls=calls or None)

    def _add_call(self, delta: _CallDelta) -> None:
        if delta.index not in self._calls and len(self._calls) >= NUM_CALLS_MAX:
            raise AgentError(f"expected at most {NUM_CALLS_MAX} calls in a reply")
        call = self._calls.setdefault(delta.index, ReplyCall())
        call.id = call.id or delta.id or ""
        if delta.function is not None:
            call.function.name += delta.function.name or ""
            call.function.arguments += delta.function.arguments or ""


async def read_events(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Yield the data of each event up to the end marker.

    Raises:
        AgentError: The stream ends without its marker, or is too long.

    """
    unended: list[bytes] = []
    num_bytes = 0
    async for piece in content.iter_any():
        num_bytes += len(piece)
        if num_bytes > REPLY_BYTES_MAX:
            raise AgentError(f"expected a reply of at most {REPLY_BYTES_MAX} bytes")
        unended.append(piece)
        if b"\n" not in piece:
            continue
        *lines, rest = b"".join(unended).split(b"\n")
        unended = [rest]
        for line in lines:
            data = line.removeprefix(_PREFIX).strip()
            if data == _END:
                return
            if line.startswith(_PREFIX) and data:
                yield data
    raise AgentError("the reply broke off")
