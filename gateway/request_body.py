"""Reads and decompresses request bodies, within limits on time and size.

aiohttp could decompress while it reads, but it closes the connection on a corrupt body before the
error response is out. Its decompression is therefore off (see `listening.py`).
"""

import asyncio
import zlib

from aiohttp import web

from penstock.gateway.config import GatewayConfig
from penstock.gateway.errors import ApiError

# 32 tells zlib to detect which of the two headers the data has.
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


async def read_whole(config: GatewayConfig, request: web.Request) -> bytes:
    """Return the decompressed body of a request.

    Raises:
        ApiError: 408, it did not arrive in time; 413, it is too large; 400, it does not match its
            `Content-Encoding`; 415, that encoding is not supported.

    """
    try:
        async with asyncio.timeout(config.body_s_max):
            body = await request.read()
    except TimeoutError as error:
        text = f"the body did not arrive within {config.body_s_max:g} s"
        raise ApiError(408, "request_timeout", text) from error
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding in {"", "identity"}:
        return body
    if encoding not in {"gzip", "deflate"}:
        text = "expected Content-Encoding gzip, deflate or none"
        raise ApiError(415, "unsupported_encoding", text)
    return _decompressed(body, encoding, config.body_bytes_max)


def _decompressed(body: bytes, encoding: str, bytes_max: int) -> bytes:
    stream = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        # Bounded while it decompresses: a small body may expand to gigabytes.
        data = stream.decompress(body, bytes_max + 1)
    except zlib.error as error:
        text = f"the body does not match its Content-Encoding, {encoding}"
        raise ApiError(400, "invalid_body", text) from error
    if len(data) > bytes_max:
        raise ApiError(413, "body_too_large", "the body is larger than this gateway accepts")
    if not stream.eof:
        raise ApiError(400, "invalid_body", f"the {encoding} body was cut short")
    return data
