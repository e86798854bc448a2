"""The HTTP interface for external programs that play rollouts.

    POST /v1/rollouts/take                  {"wait_s"} -> an attempt with its task, URL and key
    POST /v1/rollouts/{id}/v1/...           model routes: chat completions, responses, messages
    POST /v1/rollouts/{id}/alive            keeps an attempt whose agent is busy elsewhere
    POST /v1/rollouts/{id}/end              {"reward", "outcome", "files", ...} ends it
    GET  /openapi.json                      this interface as OpenAPI 3.1

The first route needs the run's key, the others the key that came with the attempt.
"""

import base64
import binascii
import logging
from functools import partial
from typing import Any, Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from penstock.actors.policy.chat.format import ChatFormat
from penstock.gateway.conversation import Opening, ParsedRequest
from penstock.gateway.errors import ApiError, error_response, invalid
from penstock.gateway.rollouts.bodies import (
    AttemptInfo,
    EndBody,
    EndReply,
    ExternalTask,
    TakeBody,
    TakeReply,
)
from penstock.gateway.rollouts.config import RolloutsConfig
from penstock.gateway.rollouts.episode import OpenAttempt
from penstock.gateway.rollouts.openapi import document
from penstock.gateway.routes.body import decode_body
from penstock.gateway.routes.chat import read_chat
from penstock.gateway.routes.messages import read_messages
from penstock.gateway.routes.responses import read_responses
from penstock.messages.errors import PenstockError
from penstock.messages.rollout import EpisodeEnd, EpisodeFiles
from penstock.messages.task import Task

log = logging.getLogger(__name__)

MODEL_ROUTES = {
    "/v1/chat/completions": read_chat,
    "/v1/responses": read_responses,
    "/v1/messages": read_messages,
}
NUM_FILES_MAX = 1024
"""Maximum files that an attempt may leave changed."""
_RETRY_HEADER = "x-stainless-retry-count"
"""Sent by the SDKs of OpenAI and Anthropic with each request: 0, or the number of the retry."""


class AttemptSource(Protocol):
    """Hands out attempts and finds open ones."""

    @property
    def config(self) -> RolloutsConfig:
        """Address and limits."""
        ...

    @property
    def chat(self) -> ChatFormat:
        """Chat format of the policy."""
        ...

    def now(self) -> float:
        """Return the time in Unix seconds."""
        ...

    def is_client(self, key: str) -> bool:
        """Return whether a bearer key may take attempts."""
        ...

    async def take(self, wait_s: float) -> OpenAttempt | None:
        """Hand the longest-waiting attempt to a client; return None if there is none in time."""
        ...

    async def put_back(self, attempt: OpenAttempt) -> None:
        """Let another client take an attempt."""
        ...

    def find(self, rollout_id: str, key: str) -> OpenAttempt | None:
        """Return the attempt with this key; the call counts as a sign of life of its client."""
        ...


_ENDS = {
    "finished": EpisodeEnd.FINISHED,
    "failed": EpisodeEnd.POLICY_ERROR,
    "lost": EpisodeEnd.INFRASTRUCTURE_ERROR,
}


def build_app(service: AttemptSource, *middlewares: Middleware) -> web.Application:
    """Return the application of one service.

    Args:
        service: Hands out the attempts.
        middlewares: Middlewares around the application's own, outermost first.

    """
    app = web.Application(
        client_max_size=service.config.body_bytes_max, middlewares=[*middlewares, _errors]
    )
    attempt = "/v1/rollouts/{rollout_id}"
    app.add_routes(
        [
            web.post("/v1/rollouts/take", partial(_take, service)),
            *(
                web.post(attempt + path, partial(_sample, service, read))
                for path, read in MODEL_ROUTES.items()
            ),
            web.get(attempt + "/v1/models", partial(_models, service)),
            web.post(attempt + "/alive", partial(_alive, service)),
            web.post(attempt + "/end", partial(_end, service)),
            web.get("/openapi.json", _openapi),
            web.get("/healthz", _healthz),
        ]
    )
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert errors to responses in the format of the route."""
    try:
        return await handler(request)
    except ApiError as error:
        failure = error
    except web.HTTPException as error:
        failure = ApiError(error.status, error.reason.lower().replace(" ", "_"), error.reason)
    except PenstockError as error:
        failure = ApiError(503, "unavailable", str(error), retry_after_s=1.0)
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        failure = ApiError(500, "internal_error", "the service failed on this request")
    rollout_id = request.match_info.get("rollout_id", "")
    log.debug("rollout %s: %d %s", rollout_id, failure.status, failure.code)
    path = request.path.removeprefix(f"/v1/rollouts/{rollout_id}")
    return error_response(failure, path)


async def _take(service: AttemptSource, request: web.Request) -> web.Response:
    if not service.is_client(_bearer(request)):
        raise ApiError(401, "invalid_api_key", "expected the key of the run's rollouts")
    body = decode_body(await request.read() or b"{}", TakeBody)
    found = await service.take(min(body.wait_s, service.config.wait_s_max))
    if found is None:
        return _json(TakeReply(None))
    attempt, lease_s = found, service.config.lease_s
    # A client that left while waiting never receives its attempt.
    if request.transport is None or request.transport.is_closing():
        await service.put_back(attempt)
        return _json(TakeReply(None))
    command = attempt.episode.command
    url = f"{request.scheme}://{request.host}/v1/rollouts/{command.rollout_id}"
    taken = AttemptInfo(
        rollout_id=command.rollout_id,
        group_id=command.group_id,
        member=command.member,
        group_size=command.group_size,
        purpose=str(command.purpose),
        policy_version=command.policy_version,
        url=url,
        base_url=f"{url}/v1",
        api_key=attempt.key,
        model=service.config.model,
        lease_s=lease_s,
        task=_task(command.task),
    )
    return _json(TakeReply(taken))


def _task(task: Task) -> ExternalTask:
    binaries = {path: base64.b64encode(data).decode() for path, data in task.binaries.items()}
    return ExternalTask(
        task_id=task.task_id,
        category=task.category,
        source=task.source,
        instruction=task.instruction,
        files=task.files,
        binaries=binaries,
        limits=task.limits,
    )


async def _sample(service: AttemptSource, read: Any, request: web.Request) -> web.StreamResponse:
    attempt = _attempt(service, request)
    body = await request.read()
    parsed: ParsedRequest = read(body)
    conversation = parsed.conversation
    if conversation.model not in {"", service.config.model}:
        text = f"there is no model {conversation.model!r} here; expected {service.config.model!r}"
        raise ApiError(404, "model_not_found", text, "model")
    is_retry = request.headers.get(_RETRY_HEADER, "0") != "0"
    reply = await attempt.episode.answer(conversation, body, is_retry=is_retry)
    # Sampling may take long, so it counts as a sign of life of the client.
    service.find(request.match_info["rollout_id"], _bearer(request))
    writer = parsed.writer(
        Opening(
            reply.request_id,
            service.now(),
            conversation,
            reply.context_ids,
            service.chat.tokenizer,
        )
    )
    if not conversation.is_streamed:
        return web.Response(body=writer.whole([reply]), content_type="application/json")
    # The turn is stored as a whole before it is streamed.
    parts = [*writer.begin(), *writer.deltas(reply, reply.deltas), *writer.end([reply])]
    return web.Response(body=b"".join(parts), content_type="text/event-stream")


async def _models(service: AttemptSource, request: web.Request) -> web.Response:
    _attempt(service, request)
    entry = {"id": service.config.model, "object": "model", "created": 0, "owned_by": "penstock"}
    return web.json_response({"object": "list", "data": [entry]})


async def _alive(service: AttemptSource, request: web.Request) -> web.Response:
    attempt = _attempt(service, request)
    return web.json_response({"num_turns": attempt.episode.num_turns})


async def _end(service: AttemptSource, request: web.Request) -> web.Response:
    attempt = _attempt(service, request)
    body = decode_body(await request.read() or b"{}", EndBody)
    episode = attempt.episode
    files = _files(body)
    if episode.num_turns == 0 and body.outcome != "lost":
        text = "the attempt has no turn: expected outcome lost, or a model request before the end"
        raise invalid(text, "outcome")
    await episode.end(
        _ENDS[body.outcome],
        reward=body.reward,
        files=files,
        deleted=body.deleted[:NUM_FILES_MAX],
        error=body.detail[:1000],
    )
    ended = await episode.ended
    return _json(EndReply(end=str(ended.end), num_turns=len(ended.turns)))


def _files(body: EndBody) -> EpisodeFiles:
    if len(body.files) + len(body.binaries) > NUM_FILES_MAX:
        raise invalid(f"expected at most {NUM_FILES_MAX} files", "files")
    changed = {path: text.encode("utf-8", "replace") for path, text in body.files.items()}
    for path, text in body.binaries.items():
        try:
            changed[path] = base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise invalid(f"expected base64: {error}", f"binaries.{path}") from error
    for path in [*changed, *body.deleted]:
        if not path or path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise invalid(f"expected paths below the working directory, got {path!r}", "files")
    return EpisodeFiles(changed=changed)


def _attempt(service: AttemptSource, request: web.Request) -> OpenAttempt:
    rollout_id = request.match_info["rollout_id"]
    attempt = service.find(rollout_id, _bearer(request))
    if attempt is None:
        text = f"there is no open attempt {rollout_id!r} with this key: it may have ended"
        raise ApiError(404, "rollout_not_found", text)
    return attempt


def _json(reply: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(reply), content_type="application/json")


def _bearer(request: web.Request) -> str:
    # Anthropic's SDK sends its key in a header of its own.
    if key := request.headers.get("x-api-key"):
        return key
    return request.headers.get("Authorization", "").partition(" ")[2].strip()


async def _healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _openapi(request: web.Request) -> web.Response:
    return web.json_response(document([*MODEL_ROUTES]))
