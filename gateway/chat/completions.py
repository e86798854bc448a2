"""`POST /v1/chat/completions`: checked, sampled, shown, recorded."""

import contextlib
from collections.abc import Generator

from aiohttp import web

from penstock.actors.policy.chat.format import UnrenderableError
from penstock.gateway.chat.exchange import Exchange
from penstock.gateway.chat.generation import Generation
from penstock.gateway.chat.prompt import check_length, offered_tools, render_context
from penstock.gateway.chat.schema import ChatRequest, parse_chat
from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.services import EXTRA_HEADERS, REQUEST_ID, Services
from penstock.messages.task import Sampling

SESSION_HEADERS = (
    "X-Session-Id",
    "X-Multi-Turn-Session-Id",
    "X-Session-Affinity",
    "X-Litellm-Session-Id",
)
SESSION_CHARS_MAX = 256


async def chat_completions(services: Services, request: web.Request) -> web.StreamResponse:
    """Answer one chat request."""
    key = services.authenticate(request)
    chat = parse_chat(await request.read())
    _check_model(chat, services)
    now = services.ctx.monotonic
    services.limiter.enter(key, now())
    request[EXTRA_HEADERS] = dict(services.limiter.headers(key, now()))
    generation = None
    try:
        with _slot(services):
            session_id = services.pseudonyms.session(
                key, session_of(request) or request[REQUEST_ID]
            )
            generation = plan(chat, services, request[REQUEST_ID], session_id)
            return await Exchange(services, request, key, chat, generation).answer()
    finally:
        services.limiter.leave(key, _num_tokens(generation), now())


def plan(chat: ChatRequest, services: Services, request_id: str, session_id: str) -> Generation:
    """Return what is to be sampled for a request.

    Raises:
        ApiError: 400, the conversation does not fit the context or the format.

    """
    config, chat_format = services.config, services.chat_format
    try:
        context = render_context(chat, chat_format, session_id, services.memory)
    except UnrenderableError as error:
        raise invalid(str(error), "messages") from error
    requested = chat.max_completion_tokens or chat.max_tokens
    room = min(config.reply_tokens_max, config.context_tokens_max - len(context))
    num_reply = min(requested or max(1, room), config.reply_tokens_max)
    check_length(len(context), num_reply, config.context_tokens_max)
    stops = list(chat_format.stop_ids)
    if not chat.parallel_tool_calls and offered_tools(chat):
        if chat_format.call_end_id is None:
            text = "not supported by this model's chat format; leave it out or give true"
            raise invalid(text, "parallel_tool_calls")
        stops.append(chat_format.call_end_id)
    sampling = Sampling(
        temperature=1.0 if chat.temperature is None else chat.temperature,
        top_p=1.0 if chat.top_p is None else chat.top_p,
        num_tokens_max=num_reply,
        seed=services.ctx.random.getrandbits(31) if chat.seed is None else chat.seed,
        stop_token_ids=tuple(stops),
    )
    return Generation(request_id, session_id, context, sampling)


def session_of(request: web.Request) -> str:
    """Return the session that a request names, or the empty string.

    Raises:
        ApiError: 400, the name is too long.

    """
    for name in SESSION_HEADERS:
        if value := request.headers.get(name, ""):
            if len(value) > SESSION_CHARS_MAX:
                text = f"expected at most {SESSION_CHARS_MAX} characters"
                raise ApiError(400, "invalid_value", text, name)
            return value
    return ""


@contextlib.contextmanager
def _slot(services: Services) -> Generator[None, None, None]:
    """Hold one of the gateway's places for a chat request.

    Raises:
        ApiError: 503, all are taken or the gateway is stopping.

    """
    if services.is_draining or services.num_chats >= services.config.num_requests_max:
        text = "the gateway is stopping" if services.is_draining else "all places are taken"
        raise ApiError(503, "overloaded", text, retry_after_s=1.0)
    services.num_chats += 1
    services.metrics.in_progress.set(services.num_chats)
    try:
        yield
    finally:
        services.num_chats -= 1
        services.metrics.in_progress.set(services.num_chats)


def _num_tokens(generation: Generation | None) -> int:
    if generation is None:
        return 0
    return len(generation.context_ids) + len(generation.sampled.token_ids)


def _check_model(chat: ChatRequest, services: Services) -> None:
    if chat.model != services.config.model:
        text = f"there is no model {chat.model!r} here; expected {services.config.model!r}"
        raise ApiError(404, "model_not_found", text, "model")
