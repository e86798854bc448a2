"""What every HTTP application has around its routes: request ids, errors, counts of responses."""

import logging
from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from penstock.gateway.errors import ApiError, error_response
from penstock.gateway.identity import random_id
from penstock.messages.errors import PenstockError

log = logging.getLogger(__name__)

# Up to 120 s, the default of `request_s_max`.
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
REQUEST_ID = web.RequestKey("request_id", str)
EXTRA_HEADERS = web.RequestKey("extra_headers", dict[str, str])
"""Headers to send with the response, whether it is a reply or an error."""


class GatewayMetrics:
    """Prometheus metrics of one gateway, in a registry of its own: a process may host several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "penstock_gateway_requests",
            "HTTP requests answered.",
            ["route", "status"],
            registry=self.registry,
        )
        self.in_progress = Gauge(
            "penstock_gateway_chat_in_progress", "Chat requests open.", registry=self.registry
        )
        self.first_token_s = Histogram(
            "penstock_gateway_first_token_seconds",
            "From the request to its first sampled token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.duration_s = Histogram(
            "penstock_gateway_chat_seconds",
            "From the request to the end of its reply.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.tokens = Counter(
            "penstock_gateway_tokens", "Tokens by kind.", ["kind"], registry=self.registry
        )
        self.retries = Counter(
            "penstock_gateway_retries",
            "Attempts after the first, over all chat requests.",
            registry=self.registry,
        )
        self.unrecorded = Counter(
            "penstock_gateway_unrecorded",
            "Replies refused because neither the log nor the disk took their record.",
            registry=self.registry,
        )
        self.prefixes = Counter(
            "penstock_gateway_prefixes",
            "Requests that continue a conversation: exact if their context begins with all that "
            "was sampled in it, as it was sampled.",
            ["kind"],
            registry=self.registry,
        )
        self.feedback = Counter(
            "penstock_gateway_feedback", "Feedback taken.", ["name"], registry=self.registry
        )

    def render(self) -> bytes:
        """Return the metrics in Prometheus text format."""
        return generate_latest(self.registry)


def answering(prefixes: Mapping[str, str], metrics: GatewayMetrics | None = None) -> Middleware:
    """Return the middleware that every application has outermost.

    Args:
        prefixes: Prefixes of request ids by path; elsewhere `req`.
        metrics: Counts the responses, if given.

    """

    @web.middleware
    async def outer(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Assign a request id, convert errors to responses, and count the response."""
        name = request[REQUEST_ID] = random_id(prefixes.get(request.path, "req"))
        try:
            response = await handler(request)
        except ConnectionResetError:
            # The client left: nobody reads this response, but metrics count its status.
            log.debug("%s: the client closed the connection", name)
            response = web.Response(status=499)
        except (ApiError, PenstockError, web.HTTPException, web.RequestPayloadError) as error:
            api_error = _as_api_error(error, request, prefixes)
            _log_refusal(name, request, api_error)
            response = error_response(api_error, request.path)
        except Exception:
            # Whatever the handler did not expect fails this one request, not the gateway.
            log.exception("%s %s: request %s failed", request.method, request.path, name)
            error = ApiError(500, "internal_error", "the gateway failed on this request")
            response = error_response(error, request.path)
        # A stream's headers are out already.
        if not response.prepared:
            response.headers.update(request.get(EXTRA_HEADERS, {}))
            # Not `name`: a replayed reply keeps the id of its first request.
            response.headers["x-request-id"] = request[REQUEST_ID]
        # The route's pattern and not the path: scanners must not add a metric series per path.
        route = request.match_info.route.resource
        label = route.canonical if route else "unknown"
        if metrics is not None:
            metrics.requests.labels(label, str(response.status)).inc()
        return response

    return outer


def _log_refusal(name: str, request: web.Request, error: ApiError) -> None:
    """Log the status and code of a refusal, never its message: that may quote the user."""
    # Clients' own mistakes are their business; overload, limits and failures are the operator's.
    level = logging.WARNING if error.status == 429 or error.status >= 500 else logging.DEBUG
    resource = request.match_info.route.resource
    route = resource.canonical if resource else "unknown"
    log.log(level, "request %s to %s refused: %d %s", name, route, error.status, error.code)


def _as_api_error(error: Exception, request: web.Request, prefixes: Mapping[str, str]) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, "body_too_large", "the body is larger than this gateway accepts")
    if isinstance(error, web.HTTPNotFound):
        served = f"; models are asked by POST {', '.join(prefixes)}" if prefixes else ""
        text = f"no route {request.method} {request.path[:100]}{served}"
        return ApiError(404, "unknown_route", text)
    if isinstance(error, web.HTTPException):
        return ApiError(error.status, error.reason.lower().replace(" ", "_"), error.reason)
    if isinstance(error, web.RequestPayloadError):
        return ApiError(400, "invalid_body", "the body was cut short")
    return ApiError(503, "unavailable", str(error), retry_after_s=1.0)
