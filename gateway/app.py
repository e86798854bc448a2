"""Routes, request ids, errors.

`/healthz`, `/readyz`, `/metrics`, `/v1/models`.
"""

import logging
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from penstock.gateway.errors import ApiError, error_response
from penstock.gateway.exchange.serve import Read, count_tokens, serve
from penstock.gateway.external_sessions import post_session
from penstock.gateway.feedback import (
    delete_feedback,
    get_feedback,
    patch_feedback,
    post_feedback,
    post_feedback_batch,
)
from penstock.gateway.identity import random_id
from penstock.gateway.page.episodes import list_episodes, read_episode
from penstock.gateway.page.labels import post_label
from penstock.gateway.page.live_page import live_page
from penstock.gateway.page.monitor_feed import MonitorFeed, monitor_events, monitor_state
from penstock.gateway.routes.chat import read_chat
from penstock.gateway.routes.completions import read_completions
from penstock.gateway.routes.generate import read_generate
from penstock.gateway.routes.messages import read_count, read_messages
from penstock.gateway.routes.responses import read_responses
from penstock.gateway.services import EXTRA_HEADERS, REQUEST_ID, Services
from penstock.messages.errors import PenstockError


async def healthz(services: Services, request: web.Request) -> web.Response:
    """Return 200: the process serves."""
    return web.json_response({"status": "ok"})


async def readyz(services: Services, request: web.Request) -> web.Response:
    """Return whether chat requests can be answered.

    Raises:
        ApiError: 503 with what is missing.

    """
    if text := services.not_ready:
        code, wait_s = ("stopping", 1.0) if services.is_draining else ("no_generator", 2.0)
        raise ApiError(503, code, text, retry_after_s=wait_s)
    return web.json_response({"status": "ready", "policy_version": services.policy_version})


async def models(services: Services, request: web.Request) -> web.Response:
    """List the one model, in OpenAI's form and in Anthropic's."""
    services.authenticate(request)
    found = _model(services)
    ends = {"has_more": False, "first_id": found["id"], "last_id": found["id"]}
    return web.json_response({"object": "list", "data": [found]} | ends)


async def model(services: Services, request: web.Request) -> web.Response:
    """Describe one model.

    Raises:
        ApiError: 404, there is no such.

    """
    services.authenticate(request)
    name = request.match_info["model"]
    if name != services.config.model:
        text = f"there is no model {name!r} here; expected {services.config.model!r}"
        raise ApiError(404, "model_not_found", text, "model")
    return web.json_response(_model(services))


def _model(services: Services) -> dict[str, Any]:
    return {
        "id": services.config.model,
        "object": "model",
        "created": 0,
        "owned_by": "penstock",
        "policy_version": services.policy_version,
        "max_model_len": services.config.context_tokens_max,
        "type": "model",
        "display_name": services.config.model,
        "created_at": "1970-01-01T00:00:00Z",
    }


async def metrics(services: Services, feed: MonitorFeed, request: web.Request) -> web.Response:
    """Return the gateway's metrics and, where the monitor answers, the run's."""
    services.admit_viewer(request)
    text = services.metrics.render()
    try:
        text += (await feed.snapshot()).exposition
    except PenstockError as error:
        text += f"# the monitor does not answer: {type(error).__name__}\n".encode()
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4"})


log = logging.getLogger(__name__)
ROUTES: dict[str, tuple[Read, str]] = {
    "/v1/chat/completions": (read_chat, "chatcmpl"),
    "/v1/responses": (read_responses, "resp"),
    "/v1/messages": (read_messages, "msg"),
    "/v1/completions": (read_completions, "cmpl"),
    "/inference/v1/generate": (read_generate, "gen"),
}
"""Path -> how its body is read, and what its requests' ids begin with."""


def build_app(services: Services, *middlewares: Middleware) -> web.Application:
    """Return the application of one gateway."""
    feed = MonitorFeed(services.ctx)
    app = web.Application(
        client_max_size=services.config.body_bytes_max, middlewares=[*middlewares, _outer(services)]
    )
    app.add_routes(
        [
            *(web.post(path, partial(serve, services, read)) for path, (read, _) in ROUTES.items()),
            web.post("/v1/messages/count_tokens", partial(count_tokens, services, read_count)),
            web.get("/v1/models/{model:.+}", partial(model, services)),
            web.get("/v1/models", partial(models, services)),
            web.post("/v1/sessions", partial(post_session, services)),
            web.post("/v1/feedback", partial(post_feedback, services)),
            web.post("/v1/feedback/batch", partial(post_feedback_batch, services)),
            web.get("/v1/feedback/{feedback_id}", partial(get_feedback, services)),
            web.patch("/v1/feedback/{feedback_id}", partial(patch_feedback, services)),
            web.delete("/v1/feedback/{feedback_id}", partial(delete_feedback, services)),
            web.get("/healthz", partial(healthz, services)),
            web.get("/readyz", partial(readyz, services)),
            web.get("/metrics", partial(metrics, services, feed)),
            web.get("/v1/monitor/state", partial(monitor_state, services, feed)),
            web.get("/v1/monitor/events", partial(monitor_events, services, feed)),
            web.get("/v1/monitor/episodes", partial(list_episodes, services)),
            web.get("/v1/monitor/episodes/{rollout_id}", partial(read_episode, services)),
            web.post("/v1/monitor/episodes/{rollout_id}/labels", partial(post_label, services)),
            web.get("/", partial(live_page, services)),
        ]
    )
    return app


def _outer(services: Services) -> Middleware:
    @web.middleware
    async def outer(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Name the request, turn errors into the route's form, count."""
        request[REQUEST_ID] = random_id(_prefix(request.path))
        try:
            response = await handler(request)
        except ConnectionResetError:
            response = web.Response(status=499)
        except (ApiError, PenstockError, web.HTTPException, web.RequestPayloadError) as error:
            response = error_response(_as_api_error(error), request.path)
        except Exception:  # The top of a request: its failure is this user's alone.
            log.exception("%s failed", request[REQUEST_ID])
            error = ApiError(500, "internal_error", "the gateway failed on this request")
            response = error_response(error, request.path)
        if not response.prepared:
            response.headers.update(request.get(EXTRA_HEADERS, {}))
            response.headers["x-request-id"] = request[REQUEST_ID]
        route = request.match_info.route.resource
        name = route.canonical if route else "unknown"
        services.metrics.requests.labels(name, str(response.status)).inc()
        return response

    return outer


def _prefix(path: str) -> str:
    return ROUTES[path][1] if path in ROUTES else "req"


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, "body_too_large", "the body is larger than this gateway takes")
    if isinstance(error, web.HTTPException):
        return ApiError(error.status, error.reason.lower().replace(" ", "_"), error.reason)
    if isinstance(error, web.RequestPayloadError):
        text = "the body was cut short"
        return ApiError(400, "invalid_body", text)
    return ApiError(503, "unavailable", str(error), retry_after_s=1.0)
