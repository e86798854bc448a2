"""What a simulated user does: ask by the official `openai` client, and later say what it thinks."""

import asyncio
from typing import Any

import msgspec
import openai
from openai.types.chat import ChatCompletionMessage, ChatCompletionToolParam
from tests.lab.simulate.users.people import Person, ReplyTraits
from tests.lab.simulate.users.tiny_policy import (
    COMMAND,
    REPLY_TOKENS_MAX,
    TOOL,
    prompt,
    traits_of,
)
from tests.lab.simulate.users.virtual_io import now_real

from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json

REQUEST_S_MAX = 60.0
NUM_AT_ONCE = 16
_TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


NO_REPLY = (openai.OpenAIError, AttributeError, LookupError, TypeError, ValueError)
"""What comes of an answer that is none: the client checks its status, and nothing in it."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What a user got."""

    request_id: str
    traits: ReplyTraits | None


def connect(url: str, token: str) -> openai.AsyncOpenAI:
    """Return a client of a service of this machine, which tries each request once."""
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key=token,
        max_retries=0,
        timeout=REQUEST_S_MAX,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )


async def post_feedback(
    client: openai.AsyncOpenAI, request_id: str, feedback_id: str, *, is_accepted: bool
) -> None:
    """Say what a user thinks of a reply: a route that the client has no method for.

    Raises:
        OpenAIError: The service did not take it.

    """
    body = {
        "request_id": request_id,
        "feedback_id": feedback_id,
        "name": "accept" if is_accepted else "reject",
        "value": 1.0,
    }
    await client.post("/feedback", body=body, cast_to=dict[str, Any])


class UserClient:
    """All users' requests to one service, at most `NUM_AT_ONCE` at a time."""

    def __init__(self, url: str, tokens: dict[str, str]) -> None:
        self._client = connect(url, "unused")
        self._of_tenant = {
            tenant: self._client.with_options(api_key=token) for tenant, token in tokens.items()
        }
        """Over the connections of the one above."""
        self._room = asyncio.Semaphore(NUM_AT_ONCE)
        self.num_requests = 0
        self.num_failed = 0
        """Requests without a reply: any status but 200, no completion, or none in time."""
        self.num_refused = 0
        """Feedback that met a limit."""

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def ask(self, person: Person, topic: str, seed: int | None = None) -> Reply | None:
        """Make one request, sampled by a seed if one is given; None where it failed."""
        self.num_requests += 1
        text = prompt(person.speaks_as or person.tenant, topic)
        async with self._room:
            with now_real():
                try:
                    answer = await self._of_tenant[person.tenant].chat.completions.create(
                        model="policy",
                        messages=[{"role": "user", "content": text}],
                        tools=[_TOOL],
                        max_tokens=REPLY_TOKENS_MAX,
                        temperature=1.0,
                        user=person.name,
                        seed=seed,
                    )
                    message = answer.choices[0].message
                    return Reply(request_id=answer.id, traits=_traits(message))
                except NO_REPLY:
                    self.num_failed += 1
                    return None

    async def rate(self, person: Person, reply: Reply, *, is_accepted: bool) -> str | None:
        """Post what a user thinks of a reply; return the feedback's id, None where refused."""
        client, feedback_id = self._of_tenant[person.tenant], f"fb-{reply.request_id}"
        async with self._room:
            with now_real():
                try:
                    await post_feedback(
                        client, reply.request_id, feedback_id, is_accepted=is_accepted
                    )
                except openai.RateLimitError:
                    self.num_refused += 1
                    return None
                except NO_REPLY:
                    self.num_failed += 1
                    return None
        return feedback_id


def _traits(message: ChatCompletionMessage) -> ReplyTraits | None:
    """Return the traits of a message; None where it is none of the policy's replies."""
    calls = message.tool_calls or []
    if len(calls) > 1:
        return None
    for call in calls:
        if call.type != "function" or call.function.name != TOOL:
            return None
        try:
            arguments = parse_json(call.function.arguments, dict[str, str], "arguments")
        except CodecError:
            return None
        if arguments != {"command": COMMAND}:
            return None
    return traits_of(message.content or "", bool(calls))
