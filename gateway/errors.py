"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`."""

import msgspec
from aiohttp import web

from penstock.messages.errors import PenstockError


class ApiError(PenstockError, ValueError):
    """A request that is answered by an error.

    Args:
        status: HTTP status.
        code: OpenAI's machine-readable code, e.g. `rate_limit_exceeded`.
        message: What is wrong and what was expected.
        param: The field at fault, if there is one.
        retry_after_s: When to try again; sent as `Retry-After`.

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
    """Return the error of a field that is wrong."""
    return ApiError(400, "invalid_value", message, param)


def error_body(error: ApiError) -> bytes:
    """Return the JSON of an error, as a response body or an event of a stream."""
    fields = {
        "message": error.message,
        "type": _type_of(error.status),
        "param": error.param,
        "code": error.code,
    }
    return msgspec.json.encode({"error": fields})


def error_response(error: ApiError) -> web.Response:
    """Return the HTTP response of an error."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s + 0.5)))
    return web.Response(
        status=error.status,
        body=error_body(error),
        content_type="application/json",
        headers=headers,
    )


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
