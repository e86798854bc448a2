"""Admits a request of any route (key, limits, body, capacity), then plans and answers it."""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from penstock.actors.policy.sampling import with_exploration
from penstock.gateway.answering import EXTRA_HEADERS, REQUEST_ID
from penstock.gateway.conversation import LiveRequest, ParsedRequest
from penstock.gateway.errors import ApiError
from penstock.gateway.exchange.exchange import Exchange, KeptReply
from penstock.gateway.exchange.plan import Plan, TokenCharge
from penstock.gateway.exchange.retried import HEADER, IdempotentRequest
from penstock.gateway.exchange.sessions import Thread
from penstock.gateway.exchange.summarizer import Summarizer, allows_summaries
from penstock.gateway.keys import KeySpec
from penstock.gateway.record import consent_of
from penstock.gateway.request_body import read_whole
from penstock.gateway.services import THREAD, Services

SESSION_HEADERS = (
    "X-Session-Id",
    "X-Multi-Turn-Session-Id",
    "X-Session-Affinity",
    "X-Litellm-Session-Id",
    "X-Claude-Code-Session-Id",
    "X-Opencode-Session",
    "Session-Id",
    "Session_Id",
    "Conversation-Id",
    "Conversation_Id",
)
"""Headers that may name the session; the first one present counts."""
SESSION_CHARS_MAX = 256
"""Maximum length of a session name."""
IGNORED_HEADER = "x-penstock-ignored"
_NUM_IGNORED_MAX = 32
"""Maximum names in this header."""
# Clients choose the names of unknown fields: only these are safe in a header.
_PLAIN_NAME = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)


Read = Callable[[bytes], ParsedRequest]
"""Parses a body of one route."""


@dataclass(frozen=True)
class AdmittedRequest:
    """A request within its limits, with its key and the tokens to charge."""

    request: web.Request
    key: KeySpec
    charge: TokenCharge


async def serve(services: Services, read: Read, request: web.Request) -> web.StreamResponse:
    """Answer one request, and charge its key whether it succeeds or fails.

    Args:
        services: What the endpoints share.
        read: Parser of the route's bodies.
        request: HTTP request.

    Raises:
        ApiError: The request is refused, or failed before its reply began.

    """
    async with admit(services, request) as admitted:
        body = await read_whole(services.config, request)
        if HEADER not in request.headers:
            return (await _answer(services, _read(services, read, request, body), admitted))[0]
        key = admitted.key
        retried = IdempotentRequest(services, key, request, body)
        if (kept := await retried.claim()) is not None:
            return kept
        is_kept = False
        try:
            parsed = _read(services, read, request, body)
            response, reply = await _answer(services, parsed, admitted, may_keep=True)
            if reply is not None:
                is_kept = await retried.keep(reply.body, response.headers, reply.client)
            return response
        finally:
            # Shielded: a client that disconnects must not leave a claim that blocks its retry.
            if not is_kept:
                await asyncio.shield(retried.give_up())


async def _answer(
    services: Services, parsed: ParsedRequest, admitted: AdmittedRequest, *, may_keep: bool = False
) -> tuple[web.StreamResponse, KeptReply | None]:
    """Return the response, and what of it may be kept for retries."""
    request, key, charge = admitted.request, admitted.key, admitted.charge
    conversation = parsed.conversation
    may_store = consent_of(key, conversation.store, conversation.metadata).storage
    user = services.pseudonyms.user(key, conversation.user)
    now = services.ctx.monotonic()
    conversation = services.responses.extended((key.tenant, user), conversation, now)
    parsed = parsed._replace(conversation=conversation)
    with hold_places(services, conversation.num_choices):
        # Before any work: an erasure from now on covers the request.
        erasures = await services.num_erasures(key.tenant, user) if may_store else 0
        plan = await _plan(services, conversation, admitted)
        keeps = may_keep and may_store
        exchange = Exchange(services, request, key, parsed, plan, erasures=erasures, keeps=keeps)
        # Charged even if it fails: the tokens were sampled.
        try:
            response = await exchange.answer()
        finally:
            charge.num_tokens += sum(len(choice.token_ids) for choice in exchange.choices)
    return response, exchange.kept_reply(response)


async def count_tokens(services: Services, read: Read, request: web.Request) -> web.Response:
    """Return the number of tokens of a prompt, and charge them to the key.

    Args:
        services: What the endpoints share.
        read: Parser of the route's bodies.
        request: HTTP request.

    Raises:
        ApiError: The request is refused.

    """
    async with admit(services, request) as admitted:
        parsed = _read(services, read, request, await read_whole(services.config, request))
        with hold_places(services, 1):
            services.planner.check_size(parsed.conversation, admitted.charge)
            request[THREAD] = _thread(services, request, admitted.key, parsed.conversation)
            plan = await _plan_unsummarized(services, admitted, parsed.conversation)
        return web.json_response({"input_tokens": len(plan.context_ids)})


@contextlib.asynccontextmanager
async def admit(services: Services, request: web.Request) -> AsyncGenerator[AdmittedRequest, None]:
    """Admit a request by its key and limits; charge the key at the end.

    Raises:
        ApiError: 401, the key is unknown; 429, a limit is reached.

    """
    key = services.authenticate(request)
    request[EXTRA_HEADERS] = dict(await services.limits.enter(key))
    charge = TokenCharge()
    try:
        yield AdmittedRequest(request, key, charge)
    finally:
        # Shielded: a client that disconnects must not keep its place or escape the charge.
        await asyncio.shield(services.limits.leave(key, charge.num_tokens))


def _read(services: Services, read: Read, request: web.Request, body: bytes) -> ParsedRequest:
    parsed = read(body)
    request[EXTRA_HEADERS].update(_ignored_header(parsed.ignored))
    model = parsed.conversation.model
    if model not in {"", services.config.model}:
        text = f"there is no model {model!r} here; expected {services.config.model!r}"
        raise ApiError(404, "model_not_found", text, "model")
    return parsed


async def _plan(services: Services, conversation: LiveRequest, admitted: AdmittedRequest) -> Plan:
    request, key = admitted.request, admitted.key
    plan_of = partial(_plan_unsummarized, services, admitted)
    can_summarize = conversation.prompt is None and services.summary.is_asked
    may_summarize = can_summarize and allows_summaries(request, key)
    # Before `_thread` hashes the messages: an oversized prompt must cost as little as possible. One
    # that may be summarized is checked later, as it may fit then.
    if not may_summarize:
        services.planner.check_size(conversation, admitted.charge)
    request[THREAD] = _thread(services, request, key, conversation)
    if not may_summarize:
        return await plan_of(conversation)
    return await Summarizer(services, request, key, admitted.charge, plan_of).plan(conversation)


async def _plan_unsummarized(
    services: Services, admitted: AdmittedRequest, conversation: LiveRequest
) -> Plan:
    request, key = admitted.request, admitted.key
    services.planner.check_size(conversation, admitted.charge)
    plan = await services.planner.plan(
        conversation,
        key_id=key.key_id,
        session=(
            request[THREAD].owner,
            services.pseudonyms.session(key, request[THREAD].name),
        ),
        seed=services.ctx.random.getrandbits(31),
        charge=admitted.charge,
    )
    plan = plan._replace(is_named=bool(session_of(request, conversation)))
    # Nothing can be learned from greedy replies: keys that agreed have them sampled.
    if not (key.explores and plan.sampling.is_greedy):
        return plan
    temperature = services.config.explore_temperature
    request[EXTRA_HEADERS]["x-sampled-temperature"] = f"{temperature:g}"
    return plan._replace(sampling=with_exploration(plan.sampling, temperature))


def _thread(
    services: Services, request: web.Request, key: KeySpec, conversation: LiveRequest
) -> Thread:
    """Return the thread of a request; send its session name if the client gave none."""
    named = session_of(request, conversation)
    thread = services.sessions.open(
        (key.tenant, services.pseudonyms.user(key, conversation.user)),
        conversation.messages,
        named=named,
        new=request[REQUEST_ID],
        now=services.ctx.monotonic(),
    )
    if not named:
        request[EXTRA_HEADERS][SESSION_HEADERS[0].lower()] = thread.name
    return thread


def session_of(request: web.Request, conversation: LiveRequest) -> str:
    """Return the session that a request names; empty if it names none.

    Raises:
        ApiError: 400, the name is too long.

    """
    for name in SESSION_HEADERS:
        if value := request.headers.get(name, ""):
            return _checked_session(value, name)
    return _checked_session(conversation.session_id, "session_id")


def _checked_session(value: str, name: str) -> str:
    if len(value) > SESSION_CHARS_MAX:
        text = f"expected at most {SESSION_CHARS_MAX} characters"
        raise ApiError(400, "invalid_value", text, name)
    return value


def _ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header that lists body fields without effect."""
    plain = [name for name in names if _PLAIN_NAME.fullmatch(name)]
    shown = plain[:_NUM_IGNORED_MAX]
    if len(shown) < len(names):
        shown.append("...")
    return {IGNORED_HEADER: ", ".join(shown)} if shown else {}


@contextlib.contextmanager
def hold_places(services: Services, num: int) -> Generator[None, None, None]:
    """Reserve capacity of the gateway for the replies of a request.

    Args:
        services: What the endpoints share.
        num: Number of replies.

    Raises:
        ApiError: 503, the gateway has too little capacity left or is stopping.

    """
    # Before any token is sampled: a reply that cannot be recorded would have to be thrown away.
    if services.recorder.is_full:
        text = "the log does not answer, and the disk spool has no room for more records"
        raise ApiError(503, "log_unavailable", text, retry_after_s=5.0)
    if services.is_draining or services.num_chats + num > services.config.num_requests_max:
        text = "the gateway is stopping" if services.is_draining else "the gateway is at capacity"
        raise ApiError(503, "overloaded", text, retry_after_s=1.0)
    services.num_chats += num
    services.metrics.in_progress.set(services.num_chats)
    try:
        yield
    finally:
        services.num_chats -= num
        services.metrics.in_progress.set(services.num_chats)
