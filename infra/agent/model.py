"""A served model as the agent sees it: chat completions, and feedback on its session."""

import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from penstock.envs.harness.tools import tool_schemas
from penstock.infra.agent.stream import (
    REPLY_BYTES_MAX,
    AgentError,
    ChatReply,
    StreamedReply,
    read_events,
)
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json

REQUEST_S_MAX = 300.0
FEEDBACK_S_MAX = 30.0
SHOWN_CHARACTERS_MAX = 300
SUMMARIES = "X-Penstock-Summaries"
"""Asks the gateway to sum the session up where it outgrows the window; of a reply, how often it
was."""


class _Choice(msgspec.Struct):
    message: ChatReply


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class Model:
    """A chat-completions endpoint, in one session.

    Args:
        url: Up to and with `/v1`.
        key: Bearer token.
        name: The model's name there.
        harness: Version of the tools that it is offered.
        stores: Whether the service may keep what is said.

    """

    def __init__(self, url: str, key: str, name: str, harness: str, *, stores: bool = True) -> None:
        self._url, self.harness = url.rstrip("/"), harness
        self._body = {"model": name, "tools": tool_schemas(harness), "stream": True}
        if not stores:
            self._body["store"] = False
        self.session_id = f"agent-{secrets.token_hex(8)}"
        self._headers = {SUMMARIES: "auto"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.num_summaries = 0
        """Of the session, which outgrew the model's window so many times."""

    async def reply(self, messages: list[dict[str, Any]], hear: Callable[[str], None]) -> ChatReply:
        """Return the assistant's next message; `hear` gets its text as it comes.

        Raises:
            AgentError: No answer, a refusal, or a reply that breaks off.

        """
        body = self._body | {"messages": messages}
        async with self._posted("chat/completions", body, REQUEST_S_MAX) as response:
            if response.content_type != "text/event-stream":  # An endpoint without streams.
                message = _whole(await _read(response, self._url), self._url)
                hear(message.content or "")
            else:
                reply = StreamedReply()
                async for event in read_events(response.content):
                    hear(reply.add(event))
                message = reply.message()
            told = response.headers.get(SUMMARIES, "")
        if told.isascii() and told.isdigit():
            self.num_summaries = int(told[:9])
        return message

    async def give_feedback(self, name: str, value: float) -> None:
        """Send one signal on the session.

        Raises:
            AgentError: No answer, or a refusal.

        """
        body = {"session_id": self.session_id, "name": name, "value": value, "source": "agent"}
        async with self._posted("feedback", body, FEEDBACK_S_MAX):
            pass

    @asynccontextmanager
    async def _posted(
        self, route: str, body: dict[str, Any], seconds_max: float
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Yield the response to a request that was not refused."""
        timeout = aiohttp.ClientTimeout(total=seconds_max)
        headers = self._headers | {"X-Session-Id": self.session_id}
        try:
            async with (
                aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
                session.post(f"{self._url}/{route}", json=body) as response,
            ):
                if response.status >= 300:
                    data = await _read(response, self._url)
                    text = data.decode("utf-8", "replace")[:SHOWN_CHARACTERS_MAX]
                    raise AgentError(f"{self._url}: status {response.status}: {text}")
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            raise AgentError(f"{self._url}: {type(error).__name__}: {error}") from error


def _whole(data: bytes, url: str) -> ChatReply:
    try:
        return parse_json(data, _Completion, "reply").choices[0].message
    except (CodecError, LookupError) as error:
        raise AgentError(f"{url}: {type(error).__name__}: {error}") from error


async def _read(response: aiohttp.ClientResponse, url: str) -> bytes:
    data = bytearray()
    async for piece in response.content.iter_chunked(65_536):
        data += piece
        if len(data) > REPLY_BYTES_MAX:
            raise AgentError(f"{url}: expected a reply of at most {REPLY_BYTES_MAX} bytes")
    return bytes(data)
