"""Bodies as they come: within a time, a size and an encoding that is undone here.

aiohttp would undo it while it reads, and then closes a connection whose body is not in its
encoding before the answer is out.
"""

import asyncio
import zlib

from aiohttp import web

from penstock.gateway.errors import ApiError
from penstock.gateway.services import Services

_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


async def read_whole(services: Services, request: web.Request) -> bytes:
    """Read a body.

    Raises:
        ApiError: 408, it did not come in time; 413, it is too large; 400, it is not in its
            `Content-Encoding`; 415, that is none of those understood.

    """
    config = services.config
    try:
        async with asyncio.timeout(config.body_s_max):
            body = await request.read()
    except TimeoutError as error:
        text = f"the body did not come within {config.body_s_max:g} s"
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
        data = stream.decompress(body, bytes_max + 1)
    except zlib.error as error:
        text = f"the body is not in its Content-Encoding, {encoding}"
        raise ApiError(400, "invalid_body", text) from error
    if len(data) > bytes_max:
        raise ApiError(413, "body_too_large", "the body is larger than this gateway takes")
    if not stream.eof:
        raise ApiError(400, "invalid_body", f"the body, in {encoding}, was cut short")
    return data
