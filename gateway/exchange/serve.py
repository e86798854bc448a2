"""Admits a request of any route: key, limits, body, place; then plans and answers it."""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from penstock.actors.policy.sampling import with_exploration
from penstock.gateway.conversation import Asked, LiveRequest
from penstock.gateway.errors import ApiError
from penstock.gateway.exchange.exchange import Exchange
from penstock.gateway.exchange.plan import Plan, TokenCharge
from penstock.gateway.exchange.retried import HEADER, Retried
from penstock.gateway.exchange.sessions import Thread
from penstock.gateway.exchange.summarizer import Summarizer, is_wanted
from penstock.gateway.keys import KeySpec
from penstock.gateway.record import consent_of
from penstock.gateway.request_body import read_whole
from penstock.gateway.services import EXTRA_HEADERS, REQUEST_ID, THREAD, Services
from penstock.messages.feedback import owner_of

SESSION_HEADERS = (
    "X-Session-Id",
    "X-Multi-Turn-Session-Id",
    "X-Session-Affinity",
    "X-Litellm-Session-Id",
)
SESSION_CHARS_MAX = 256
IGNORED_HEADER = "x-penstock-ignored"
_NUM_IGNORED_MAX = 32
_PLAIN_NAME = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)


Read = Callable[[bytes], Asked]


@dataclass(frozen=True)
class Admitted:
    """A request with its key, and what it costs."""

    request: web.Request
    key: KeySpec
    charge: TokenCharge


async def serve(services: Services, read: Read, request: web.Request) -> web.StreamResponse:
    """Answer one request whose body `read` understands; whatever it says costs its key.

    Raises:
        ApiError: The request is refused.

    """
    async with admit(services, request) as admitted:
        body = await read_whole(services, request)
        if HEADER not in request.headers:
            return (await _answer(services, _read(services, read, request, body), admitted))[0]
        key = admitted.key
        retried = Retried(services, key, request, body)
        if (kept := await retried.claim()) is not None:
            return kept
        is_kept = False
        try:
            asked = _read(services, read, request, body)
            response, reply = await _answer(services, asked, admitted, may_keep=True)
            if reply is not None:
                owner = owner_of(key.tenant, services.pseudonyms.user(key, asked.conversation.user))
                is_kept = await retried.keep(reply, response.headers, owner)
            return response
        finally:
            if not is_kept:
                await asyncio.shield(retried.give_up())


async def _answer(
    services: Services, asked: Asked, admitted: Admitted, *, may_keep: bool = False
) -> tuple[web.StreamResponse, bytes | None]:
    """Return the response, and its body if that may be kept for a while."""
    request, key, charge = admitted.request, admitted.key, admitted.charge
    conversation = asked.conversation
    may_store = consent_of(key, conversation.store, conversation.metadata).storage
    with hold_places(services, conversation.num_choices):
        plan = await _plan(services, conversation, admitted)
        exchange = Exchange(services, request, key, asked, plan, keeps=may_keep and may_store)
        try:
            response = await exchange.answer()
        finally:
            charge.num_tokens += sum(len(choice.token_ids) for choice in exchange.choices)
    return response, exchange.kept_reply(response)


async def count_tokens(services: Services, read: Read, request: web.Request) -> web.Response:
    """Answer how many tokens a prompt has; it costs as many.

    Raises:
        ApiError: The request is refused.

    """
    async with admit(services, request) as admitted:
        asked = _read(services, read, request, await read_whole(services, request))
        with hold_places(services, 1):
            services.planner.check_size(asked.conversation, admitted.charge)
            request[THREAD] = _thread(services, request, admitted.key, asked.conversation)
            plan = await _plan_as_it_is(services, admitted, asked.conversation)
        return web.json_response({"input_tokens": len(plan.context_ids)})


@contextlib.asynccontextmanager
async def admit(services: Services, request: web.Request) -> AsyncGenerator[Admitted, None]:
    """Hold a request's account with its key, and charge it at the end.

    Raises:
        ApiError: 401 or 429.

    """
    key = services.authenticate(request)
    request[EXTRA_HEADERS] = dict(await services.limits.enter(key))
    charge = TokenCharge()
    try:
        yield Admitted(request, key, charge)
    finally:
        await asyncio.shield(services.limits.leave(key, charge.num_tokens))


def _read(services: Services, read: Read, request: web.Request, body: bytes) -> Asked:
    asked = read(body)
    request[EXTRA_HEADERS].update(_told_ignored(asked.ignored))
    model = asked.conversation.model
    if model not in {"", services.config.model}:
        text = f"there is no model {model!r} here; expected {services.config.model!r}"
        raise ApiError(404, "model_not_found", text, "model")
    return asked


async def _plan(services: Services, conversation: LiveRequest, admitted: Admitted) -> Plan:
    request, key = admitted.request, admitted.key
    plan_of = partial(_plan_as_it_is, services, admitted)
    is_told = conversation.prompt is None and services.summary.is_asked
    sums_up = is_told and is_wanted(request, key)
    if not sums_up:  # Before anything reads all of a text that is refused.
        services.planner.check_size(conversation, admitted.charge)
    request[THREAD] = _thread(services, request, key, conversation)
    if not sums_up:
        return await plan_of(conversation)
    return await Summarizer(services, request, key, admitted.charge, plan_of).plan(conversation)


async def _plan_as_it_is(services: Services, admitted: Admitted, conversation: LiveRequest) -> Plan:
    request, key = admitted.request, admitted.key
    services.planner.check_size(conversation, admitted.charge)
    plan = await services.planner.plan(
        conversation,
        key_id=key.key_id,
        session_id=services.pseudonyms.session(key, request[THREAD].name),
        seed=services.ctx.random.getrandbits(31),
        charge=admitted.charge,
    )
    plan = plan._replace(is_named=bool(session_of(request, conversation)))
    if not (key.explores and plan.sampling.is_greedy):
        return plan
    temperature = services.config.explore_temperature
    request[EXTRA_HEADERS]["x-sampled-temperature"] = f"{temperature:g}"
    return plan._replace(sampling=with_exploration(plan.sampling, temperature))


def _thread(
    services: Services, request: web.Request, key: KeySpec, conversation: LiveRequest
) -> Thread:
    """Find the request's session; a client that named none gets its name in a header."""
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
    """Return the session that a request names, or the empty string.

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


def _told_ignored(names: Sequence[str]) -> dict[str, str]:
    """Return the header that lists fields without effect."""
    plain = [name for name in names if _PLAIN_NAME.fullmatch(name)]
    shown = plain[:_NUM_IGNORED_MAX]
    if len(shown) < len(names):
        shown.append("...")
    return {IGNORED_HEADER: ", ".join(shown)} if shown else {}


@contextlib.contextmanager
def hold_places(services: Services, num: int) -> Generator[None, None, None]:
    """Hold the gateway's places for a request's replies.

    Raises:
        ApiError: 503, too few are free or the gateway is stopping.

    """
    if services.recorder.is_full:
        text = "the log does not answer, and the disk has no room for further records"
        raise ApiError(503, "log_unavailable", text, retry_after_s=5.0)
    if services.is_draining or services.num_chats + num > services.config.num_requests_max:
        text = "the gateway is stopping" if services.is_draining else "all places are taken"
        raise ApiError(503, "overloaded", text, retry_after_s=1.0)
    services.num_chats += num
    services.metrics.in_progress.set(services.num_chats)
    try:
        yield
    finally:
        services.num_chats -= num
        services.metrics.in_progress.set(services.num_chats)
