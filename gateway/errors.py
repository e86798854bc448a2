"""Errors of the HTTP API, serialized in the format of the route.

OpenAI's format is `{"error": {"message", "type", "param", "code"}}`, Anthropic's is
`{"type": "error", "error": {"type", "message"}}`.
"""

import msgspec
from aiohttp import web

from penstock.messages.errors import PenstockError

ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(PenstockError, ValueError):
    """An error that the client sees.

    Args:
        status: HTTP status.
        code: Machine-readable code, OpenAI's where it has one, e.g. `rate_limit_exceeded`.
        message: What is wrong and what was expected.
        param: Path of the invalid field; None if no single field is at fault.
        retry_after_s: Seconds until a retry may succeed; sent as `Retry-After`.

    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(status, code, message, param, retry_after_s)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        where = f" (at {self.param})" if self.param else ""
        return f"{self.status} {self.code}: {self.message}{where}"


def invalid(message: str, param: str | None) -> ApiError:
    """Return a 400 error for an invalid field."""
    return ApiError(400, "invalid_value", message, param)


def error_body(error: ApiError, path: str = "") -> bytes:
    """Return an error as JSON in the format of the route at `path`."""
    if path.startswith(ANTHROPIC_PATH):
        # The format has no field for the parameter.
        text = f"{error.param}: {error.message}" if error.param else error.message
        # Anthropic has no code either: clients recognize this error by its first words.
        if error.code == "context_length_exceeded":
            text = f"prompt is too long: {error.message}"
        fields = {"type": _anthropic_type(error.status), "message": text}
        return msgspec.json.encode({"type": "error", "error": fields})
    return msgspec.json.encode({"error": openai_error(error)})


def openai_error(error: ApiError) -> dict[str, str | None]:
    """Return the fields of an error in OpenAI's format."""
    return {
        "message": error.message,
        "type": _openai_type(error.status),
        "param": error.param,
        "code": error.code,
    }


def error_response(error: ApiError, path: str) -> web.Response:
    """Return an error as an HTTP response in the format of the route at `path`."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        # Whole seconds, rounded up: a client that comes back early is refused again.
        headers["Retry-After"] = str(max(1, round(error.retry_after_s + 0.5)))
    return web.Response(
        status=error.status,
        body=error_body(error, path),
        content_type="application/json",
        headers=headers,
    )


def _openai_type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _anthropic_type(status: int) -> str:
    if status in _ANTHROPIC_TYPES:
        return _ANTHROPIC_TYPES[status]
    return "invalid_request_error" if status < 500 else "api_error"
