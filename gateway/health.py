"""`/healthz`, `/readyz`, `/metrics`, `/v1/models`."""

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
    if services.is_draining:
        raise ApiError(503, "stopping", "the gateway is stopping", retry_after_s=1.0)
    if services.policy_version < 0:
        text = "no generator serves a policy yet"
        raise ApiError(503, "no_generator", text, retry_after_s=2.0)
    return web.json_response({"status": "ready", "policy_version": services.policy_version})


async def models(services: Services, request: web.Request) -> web.Response:
    """List the one model."""
    services.authenticate(request)
    model = {
        "id": services.config.model,
        "object": "model",
        "created": 0,
        "owned_by": "penstock",
        "policy_version": services.policy_version,
        "max_model_len": services.config.context_tokens_max,
    }
    return web.json_response({"object": "list", "data": [model]})


async def metrics(services: Services, feed: MonitorFeed, request: web.Request) -> web.Response:
    """Return the gateway's metrics and, where the monitor answers, the run's."""
    services.admit_viewer(request)
    text = services.metrics.render()
    try:
        text += (await feed.snapshot()).exposition
    except PenstockError as error:
        text += f"# the monitor does not answer: {type(error).__name__}\n".encode()
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4"})
