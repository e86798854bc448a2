"""What a simulated user does over HTTP: one request, and later what this user thinks of it."""

import asyncio
from typing import Any

import aiohttp
import msgspec

from penstock.infra.simulate.users.people import Person, ReplyTraits
from penstock.infra.simulate.users.tiny_policy import (
    COMMAND,
    REPLY_TOKENS_MAX,
    TOOL,
    TOOL_SCHEMA,
    prompt,
    traits_of,
)
from penstock.infra.simulate.users.virtual_io import now_real
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json

REQUEST_S_MAX = 60.0
NUM_AT_ONCE = 16


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What a user got."""

    request_id: str
    traits: ReplyTraits | None


class UserClient:
    """All users' requests to one service, at most `NUM_AT_ONCE` at a time."""

    def __init__(self, url: str, tokens: dict[str, str]) -> None:
        self._url, self._tokens = url, tokens
        self._room = asyncio.Semaphore(NUM_AT_ONCE)
        timeout = aiohttp.ClientTimeout(total=REQUEST_S_MAX)
        connector = aiohttp.TCPConnector(force_close=False, limit=NUM_AT_ONCE)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        self.num_requests = 0
        self.num_failed = 0
        """Requests without a reply: any status but 200, or none in time."""
        self.num_refused = 0
        """Feedback that met a limit."""

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def ask(self, person: Person, topic: str, seed: int | None = None) -> Reply | None:
        """Make one request, sampled by a seed if one is given; None where it failed."""
        body = {
            "model": "policy",
            "messages": [
                {"role": "user", "content": prompt(person.speaks_as or person.tenant, topic)}
            ],
            "tools": [TOOL_SCHEMA],
            "max_tokens": REPLY_TOKENS_MAX,
            "temperature": 1.0,
            "user": person.name,
            "seed": seed,
        }
        self.num_requests += 1
        status, answer = await self._post("/v1/chat/completions", person, body)
        if status != 200:
            self.num_failed += 1
            return None
        return Reply(request_id=answer["id"], traits=_traits(answer["choices"][0]["message"]))

    async def rate(self, person: Person, reply: Reply, *, is_accepted: bool) -> str | None:
        """Post what a user thinks of a reply; return the feedback's id, None where refused."""
        body = {
            "request_id": reply.request_id,
            "feedback_id": f"fb-{reply.request_id}",
            "name": "accept" if is_accepted else "reject",
            "value": 1.0,
        }
        status, answer = await self._post("/v1/feedback", person, body)
        if status == 429:
            self.num_refused += 1
            return None
        if status != 200:
            self.num_failed += 1
            return None
        return answer["feedback_id"]

    async def _post(
        self, path: str, person: Person, body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {self._tokens[person.tenant]}"}
        async with self._room:
            with now_real():
                try:
                    post = self._session.post(f"{self._url}{path}", json=body, headers=headers)
                    async with post as reply:
                        return reply.status, await reply.json()
                except (aiohttp.ClientError, TimeoutError):
                    return 0, {}


def _traits(message: dict[str, Any]) -> ReplyTraits | None:
    """Return the traits of a message; None where it is none of the policy's replies."""
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    if len(calls) > 1:
        return None
    for call in calls:
        try:
            arguments = parse_json(call["function"]["arguments"], dict[str, str], "arguments")
        except CodecError:
            return None
        if call["function"]["name"] != TOOL or arguments != {"command": COMMAND}:
            return None
    return traits_of(message.get("content") or "", bool(calls))
