"""The HTTP application: the table of routes, and the small endpoints.

The small endpoints are `/healthz`, `/readyz`, `/metrics` and `/v1/models`.
"""

from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from penstock.gateway.answering import answering
from penstock.gateway.errors import ApiError
from penstock.gateway.exchange.serve import Read, count_tokens, serve
from penstock.gateway.external_sessions import post_session
from penstock.gateway.feedback import (
    delete_feedback,
    get_feedback,
    patch_feedback,
    post_feedback,
    post_feedback_batch,
)
from penstock.gateway.page.episodes import list_episodes, read_episode
from penstock.gateway.page.labels import post_label
from penstock.gateway.page.live_page import live_page
from penstock.gateway.page.monitor_feed import MonitorFeed, monitor_events, monitor_state
from penstock.gateway.routes.chat import read_chat
from penstock.gateway.routes.completions import read_completions
from penstock.gateway.routes.generate import read_generate
from penstock.gateway.routes.messages import read_count, read_messages
from penstock.gateway.routes.responses import read_responses
from penstock.gateway.services import Services
from penstock.messages.errors import PenstockError


async def healthz(services: Services, request: web.Request) -> web.Response:
    """Return 200 while the process serves HTTP."""
    return web.json_response({"status": "ok"})


async def readyz(services: Services, request: web.Request) -> web.Response:
    """Return 200 when chat requests can be answered.

    Raises:
        ApiError: 503; the text says what is missing.

    """
    if text := services.not_ready:
        code, wait_s = ("stopping", 1.0) if services.is_draining else ("no_generator", 2.0)
        raise ApiError(503, code, text, retry_after_s=wait_s)
    return web.json_response({"status": "ready", "policy_version": services.policy_version})


async def models(services: Services, request: web.Request) -> web.Response:
    """List the one model, with the fields of both OpenAI's and Anthropic's list."""
    services.authenticate(request)
    entry = _model(services)
    paging = {"has_more": False, "first_id": entry["id"], "last_id": entry["id"]}
    return web.json_response({"object": "list", "data": [entry]} | paging)


async def model(services: Services, request: web.Request) -> web.Response:
    """Describe one model.

    Raises:
        ApiError: 404, there is no model of that name.

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
    """Return the metrics of the gateway and, if the monitor answers, of the whole run."""
    services.admit_viewer(request)
    text = services.metrics.render()
    # Without the monitor, the gateway's own metrics are still worth a scrape.
    try:
        text += (await feed.snapshot()).exposition
    except PenstockError as error:
        text += f"# the monitor does not answer: {type(error).__name__}\n".encode()
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4"})


ROUTES: dict[str, tuple[Read, str]] = {
    "/v1/chat/completions": (read_chat, "chatcmpl"),
    "/v1/responses": (read_responses, "resp"),
    "/v1/messages": (read_messages, "msg"),
    "/v1/completions": (read_completions, "cmpl"),
    "/inference/v1/generate": (read_generate, "gen"),
}
"""Path -> the function that reads its body, and the prefix of its request ids."""


def build_app(services: Services, *middlewares: Middleware) -> web.Application:
    """Return the application of one gateway.

    Args:
        services: What the endpoints share.
        middlewares: Run around the application's own, first one outermost.

    """
    feed = MonitorFeed(services.ctx)
    prefixes = {path: prefix for path, (_, prefix) in ROUTES.items()}
    app = web.Application(
        client_max_size=services.config.body_bytes_max,
        middlewares=[*middlewares, answering(prefixes, services.metrics)],
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
