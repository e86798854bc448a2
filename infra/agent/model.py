"""A served model as the agent sees it: chat completions, and feedback on its session."""

import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from penstock.envs.harness.tools import tool_schemas
from penstock.envs.outbound import LOST, Outbound, ReplyTooLargeError, read_reply
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
        allowed: Hosts off this machine that may get key and texts in plain text.

    """

    def __init__(  # noqa: PLR0913 - independent settings of one endpoint
        self,
        url: str,
        key: str,
        name: str,
        harness: str,
        *,
        stores: bool = True,
        allowed: Sequence[str] = (),
    ) -> None:
        self._url, self.harness = url.rstrip("/"), harness
        self.session_id = f"agent-{secrets.token_hex(8)}"
        headers = {SUMMARIES: "auto", "X-Session-Id": self.session_id}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self._service = Outbound(
            url, field="--url", headers=headers, secrets=[key], allowed=allowed
        )
        self._body = {"model": name, "tools": tool_schemas(harness), "stream": True}
        if not stores:
            self._body["store"] = False
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
        try:
            async with self._service.open("POST", f"/{route}", seconds_max, json=body) as response:
                if response.status >= 300:
                    data = await _read(response, self._url)
                    text = self._service.said(data, SHOWN_CHARACTERS_MAX)
                    raise AgentError(f"{self._url}: status {response.status}: {text}")
                yield response
        except LOST as error:
            cause = self._service.hide(f"{type(error).__name__}: {error}")
            raise AgentError(f"{self._url}: {cause}") from error


def _whole(data: bytes, url: str) -> ChatReply:
    try:
        return parse_json(data, _Completion, "reply").choices[0].message
    except (CodecError, LookupError) as error:
        raise AgentError(f"{url}: {type(error).__name__}: {error}") from error


async def _read(response: aiohttp.ClientResponse, url: str) -> bytes:
    try:
        return await read_reply(response, REPLY_BYTES_MAX)
    except ReplyTooLargeError as error:
        raise AgentError(f"{url}: {error}") from error
