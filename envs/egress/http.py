"""HTTP as the proxy speaks it: requested targets, forwarded requests, and refusals. Pure."""

import re

import h11

from penstock.envs.egress.rules import EgressDeniedError, parse_target

TUNNEL_OPEN = b"HTTP/1.1 200 Connection established\r\n\r\n"
_ADDRESS = re.compile(r"http://([^/?#]*)([^#]*)(?:#.*)?", re.IGNORECASE)
_CHUNKED = (b"transfer-encoding", b"chunked")
_LENGTH = b"content-length"
_NOT_FORWARDED = frozenset(
    {b"connection", b"proxy-connection", b"proxy-authorization", b"keep-alive", b"te", b"upgrade",
     b"host", b"trailer", b"transfer-encoding", b"expect"}
)  # fmt: skip
_REASONS = {400: "Bad Request", 403: "Forbidden", 429: "Too Many Requests", 502: "Bad Gateway"}


def requested_target(method: str, text: str) -> tuple[str, int, str]:
    """Return the name, port and path of a program's request.

    Raises:
        EgressDeniedError: It is neither `CONNECT name:port` nor a whole `http://` address.

    """
    if method == "CONNECT":
        return *parse_target(text), ""
    parts = _ADDRESS.fullmatch(text)
    if parts is None:
        raise EgressDeniedError("expected CONNECT, or a whole http:// address")
    host, path = parts.groups()
    return *parse_target(host, 80), path if path.startswith("/") else f"/{path}"


def check_host(request: h11.Request, name: str, port: int) -> None:
    """Check that a plain request's Host header means the same server as its address.

    Raises:
        EgressDeniedError: It names another one. `CONNECT` itself goes no further, so its is free.

    """
    if request.method == b"CONNECT":
        return
    meant = {name.encode(), f"{name}:{port}".encode()}
    for key, value in request.headers:
        if key == b"host" and value.strip().lower() not in meant:
            raise EgressDeniedError(f"the Host header names {value.decode('ascii', 'replace')!r}")


def forwarded(request: h11.Request, target: str, path: str) -> h11.Request:
    """Return the request as the host gets it: under the allowed name, without hop-by-hop headers.

    Args:
        request: The program's.
        target: `name:port` that a rule allowed.
        path: On that host.

    """
    is_chunked = any(key == _CHUNKED[0] for key, _ in request.headers)
    left_out = _NOT_FORWARDED | (_named_in_connection(request) - {_LENGTH})
    if is_chunked:
        left_out |= {_LENGTH}
    headers = [(b"host", target.removesuffix(":80").encode()), (b"connection", b"close")]
    headers += [(key, value) for key, value in request.headers if key not in left_out]
    headers += [_CHUNKED] if is_chunked else []
    return h11.Request(method=request.method, target=path, headers=headers)


def _named_in_connection(request: h11.Request) -> set[bytes]:
    """Return the headers that are meant only for the next hop (RFC 9110, 7.6.1)."""
    values = [value for key, value in request.headers if key == b"connection"]
    return {name.strip().lower() for value in values for name in value.split(b",")}


def refusal(status: int, text: str) -> bytes:
    """Return a complete answer from the proxy itself."""
    body = f"egress proxy: {text}\n".encode("ascii", "replace")
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: text/plain\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
