"""`/healthz`, `/readyz`, `/metrics`, `/v1/models`."""

from typing import Any

from aiohttp import web

from penstock.gateway.errors import ApiError
from penstock.gateway.page.monitor_feed import MonitorFeed
from penstock.gateway.services import Services
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
