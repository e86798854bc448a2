"""HTTP to services off this machine: the one client that carries secrets and content.

Verified TLS (authorities of a private network: `SSL_CERT_FILE`), no redirects, no compression,
since a megabyte of gzip may unpack to a gigabyte, bounded replies, and no secret in what a service
says. `check_encrypted` refuses plain text before anything is sent.
"""

import base64
import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import aiohttp

from penstock.messages.settings import check_encrypted

_HIDDEN = "[hidden]"
_FORM_CHARACTERS_MIN = 6
"""Minimum characters of a key's form; with fewer, ordinary words would look like it."""
_LIKE_A_SECRET = re.compile(r"(?=\S*[\d%&\\])\S{8,}|\S{24,}")
"""Words of an error that could be a key in some encoding: ordinary ones are shorter."""


class ReplyTooLargeError(ValueError):
    """A reply has more bytes than its bound."""


LOST = (aiohttp.ClientError, TimeoutError, ReplyTooLargeError)
"""What a request raises if it gets no complete reply."""


class Outbound:
    """Requests to one service.

    Args:
        url: Its base URL.
        field: Setting or option that named it, for errors.
        headers: Of every request.
        secrets: Keys among the headers and elsewhere, which no text may repeat.
        allowed: Hosts to which plain text may go.

    Raises:
        ConfigError: The address would get secrets or content in plain text.

    """

    def __init__(
        self,
        url: str,
        *,
        field: str,
        headers: Mapping[str, str] | None = None,
        secrets: Iterable[str] = (),
        allowed: Iterable[str] = (),
    ) -> None:
        check_encrypted(field, url, allowed)
        self.url = url.rstrip("/")
        self._headers = {"Accept-Encoding": "identity"} | dict(headers or {})
        self._secrets = [secret for secret in secrets if secret]
        forms = {_squeezed(form) for secret in self._secrets for form in _forms(secret)}
        self._forms = {form for form in forms if len(form) >= _FORM_CHARACTERS_MIN}

    @asynccontextmanager
    async def open(
        self, method: str, path: str, timeout_s: float, **body: Any
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Yield the reply to one request; raises what `LOST` names."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        headers = self._headers | body.pop("headers", {})
        async with (
            aiohttp.ClientSession(
                headers=headers, timeout=timeout, auto_decompress=False
            ) as session,
            session.request(method, self.url + path, allow_redirects=False, **body) as reply,
        ):
            yield reply

    async def post(
        self, path: str, timeout_s: float, bytes_max: int, **body: Any
    ) -> tuple[int, bytes]:
        """Return status and bytes of a reply; raises what `LOST` names."""
        async with self.open("POST", path, timeout_s, **body) as reply:
            return reply.status, await read_reply(reply, bytes_max)

    def hide(self, text: str) -> str:
        """Return a text from the service without our secrets, in whatever form it repeats them."""
        for secret in self._secrets:
            text = text.replace(secret, "[key]")
        squeezed = _squeezed(text)
        return _HIDDEN if any(form in squeezed for form in self._forms) else text

    def said(self, data: bytes, characters_max: int) -> str:
        """Return the beginning of a service's error message, without anything like a key."""
        text = self.hide(data[: 8 * characters_max + 4096].decode("utf-8", "replace"))
        return (_LIKE_A_SECRET.sub(_HIDDEN, text) if self._forms else text)[:characters_max]


async def read_reply(reply: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """Read a reply whole; `Content-Length` need not be there, or true.

    Raises:
        ReplyTooLargeError: It exceeds its bound.

    """
    data = bytearray()
    async for piece in reply.content.iter_chunked(65_536):
        data += piece
        if len(data) > bytes_max:
            raise ReplyTooLargeError(f"expected a reply of at most {bytes_max} bytes")
    return bytes(data)


def _squeezed(text: str) -> str:
    return re.sub(r"[\W_]", "", text).lower()


def _forms(secret: str) -> Iterator[str]:
    """Yield the forms in which services and encoders, faulty ones too, may write a secret."""
    data = secret.encode()
    yield from (secret, secret[::-1], quote(secret), quote(quote(secret)), data.hex())
    yield "".join(f"\\u{ord(each):04x}" for each in secret)
    yield from ("".join(f"%{each:02x}" for each in data), "".join(f"&#{each};" for each in data))
    for num_before in range(3):  # Base64 depends on where in its text the secret begins.
        encoded = base64.b64encode(bytes(num_before) + data).decode()
        yield encoded[num_before + 1 if num_before else 0 : -4]
    yield base64.b32encode(data).decode().rstrip("=")
