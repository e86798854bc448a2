"""A served model as the agent sees it: chat completions, and feedback on its session."""

import secrets
from typing import Any

import aiohttp
import msgspec

from penstock.envs.harness.versions import tool_schemas
from penstock.messages.errors import CodecError, PenstockError
from penstock.messages.reading.parsing import parse_json

REQUEST_S_MAX = 300.0
FEEDBACK_S_MAX = 30.0
REPLY_BYTES_MAX = 8 << 20
SHOWN_CHARACTERS_MAX = 300
SUMMARIES = "X-Penstock-Summaries"
"""Asks the gateway to sum the session up where it outgrows the window; of a reply, how often it
was."""


class AgentError(PenstockError, ConnectionError):
    """The model's endpoint refused or did not answer; the text has its words."""


class _RequestedFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _RequestedToolCall(msgspec.Struct):
    function: _RequestedFunction
    id: str = ""
    type: str = "function"


class _ChatReply(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_RequestedToolCall] | None = None


class _Choice(msgspec.Struct):
    message: _ChatReply


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class Model:
    """A chat-completions endpoint, in one session.

    Args:
        url: Up to and with `/v1`.
        key: Bearer token.
        name: The model's name there.
        harness: Version of the tools that it is offered.

    """

    def __init__(self, url: str, key: str, name: str, harness: str) -> None:
        self._url, self._name, self.harness = url.rstrip("/"), name, harness
        self._tools = tool_schemas(harness)
        self.session_id = f"agent-{secrets.token_hex(8)}"
        self._headers = {SUMMARIES: "auto"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.num_summaries = 0
        """Of the session, which outgrew the model's window so many times."""

    async def reply(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the assistant's next message.

        Raises:
            AgentError: No answer, or a refusal.

        """
        body = {"model": self._name, "messages": messages, "tools": self._tools}
        data = await self._post("chat/completions", body, REQUEST_S_MAX)
        try:
            message = parse_json(data, _Completion, "reply").choices[0].message
        except (CodecError, LookupError) as error:
            raise AgentError(f"{self._url}: {type(error).__name__}: {error}") from error
        return msgspec.to_builtins(message)

    async def give_feedback(self, name: str, value: float) -> None:
        """Send one signal on the session.

        Raises:
            AgentError: No answer, or a refusal.

        """
        body = {"session_id": self.session_id, "name": name, "value": value, "source": "agent"}
        await self._post("feedback", body, FEEDBACK_S_MAX)

    async def _post(self, route: str, body: dict[str, Any], seconds_max: float) -> bytes:
        timeout = aiohttp.ClientTimeout(total=seconds_max)
        headers = self._headers | {"X-Session-Id": self.session_id}
        try:
            async with (
                aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
                session.post(f"{self._url}/{route}", json=body) as reply,
            ):
                data = await _read(reply)
                told = reply.headers.get(SUMMARIES, "")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise AgentError(f"{self._url}: {type(error).__name__}: {error}") from error
        if len(data) > REPLY_BYTES_MAX:
            raise AgentError(f"{self._url}: expected a reply of at most {REPLY_BYTES_MAX} bytes")
        if reply.status >= 300:
            text = data.decode("utf-8", "replace")[:SHOWN_CHARACTERS_MAX]
            raise AgentError(f"{self._url}: status {reply.status}: {text}")
        if told.isascii() and told.isdigit():
            self.num_summaries = int(told[:9])
        return data


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    """Read a body up to one byte above the bound."""
    data = bytearray()
    async for piece in reply.content.iter_chunked(65_536):
        data += piece
        if len(data) > REPLY_BYTES_MAX:
            break
    return bytes(data)
