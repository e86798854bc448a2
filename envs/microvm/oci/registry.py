"""Pulls an image from a registry, by the OCI distribution protocol.

Every wait has a deadline, every answer a bound, and every blob is verified by its digest before it
is used. Credentials are sent only to their registry and to the token service that it names, and
never along a redirect to another host.

Source: github.com/opencontainers/distribution-spec, and Docker's token authentication.
"""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import ipaddress
import logging
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
import msgspec
from yarl import URL

from penstock.envs.microvm.oci.layer_tar import LAYER_BYTES_MAX
from penstock.envs.microvm.oci.sources import (
    INDEX_DEPTH_MAX,
    MANIFEST_BYTES_MAX,
    Descriptor,
    ImageConfig,
    ImageManifest,
    checked,
    chosen,
    decoded,
)
from penstock.envs.microvm.oci.tree import ImageError
from penstock.envs.microvm.recipe.steps import Say

log = logging.getLogger(__name__)

CONNECT_S_MAX, STALL_S_MAX = 20.0, 30.0
BYTES_PER_S_MIN = 100_000
"""A blob that comes slower on average, after the first minute, is given up."""
TRIES_MAX, REDIRECTS_MAX = 3, 5
RETRY_S = 1.0
TOKEN_BYTES_MAX = 64 << 10
DOCKER_HUB = "registry-1.docker.io"
_HUB_NAMES = ("docker.io", "index.docker.io", "https://index.docker.io/v1/")
_REFERENCE = re.compile(
    r"(?:(?P<host>[a-zA-Z0-9][a-zA-Z0-9.-]*(?::\d{1,5})?)/)?(?P<name>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_KINDS = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
_REDIRECTS, _BUSY = {301, 302, 303, 307, 308}, {429, 500, 502, 503, 504}
_OK, _UNAUTHORIZED = 200, 401
_PIECE = 1 << 18


class RegistryError(ImageError):
    """A registry cannot be reached, refuses, or does not answer in time."""


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """The location of an image."""

    host: str
    name: str
    version: str
    """Tag or digest."""

    @property
    def origin(self) -> URL:
        """Return the registry's address; plain HTTP is only used on this host."""
        plain = self.host.partition(":")[0] in {"localhost", "127.0.0.1"}
        return URL(f"{'http' if plain else 'https'}://{self.host}")


def parse_reference(text: str) -> Reference:
    """Parse an image reference.

    Raises:
        ImageError: It is not an image reference.

    """
    match = _REFERENCE.fullmatch(text)
    if match is None or len(text) > 1_000:
        raise ImageError(f"image {text[:200]!r}: expected [HOST/]NAME[:TAG][@sha256:DIGEST]")
    host, name = match["host"] or "", match["name"]
    if host and "." not in host and ":" not in host and host != "localhost":
        host, name = "", f"{host}/{name}"
    if host in {"", *_HUB_NAMES}:
        host, name = DOCKER_HUB, name if "/" in name else f"library/{name}"
    return Reference(host=host, name=name, version=match["digest"] or match["tag"] or "latest")


class _Credentials(msgspec.Struct):
    auths: dict[str, dict[str, Any]] = {}


def read_credentials(path: Path | None, host: str) -> str:
    """Return the base64 credentials for a registry, or an empty string.

    Args:
        path: File in the format of `~/.docker/config.json`, which is the default.
        host: Of the registry.

    Raises:
        ImageError: The named file cannot be read, or is damaged.

    """
    file = path or Path(os.environ.get("DOCKER_CONFIG", "~/.docker")).expanduser() / "config.json"
    try:
        auths = decoded(file.read_bytes(), _Credentials, str(file)).auths
    except OSError as error:
        if path is None:
            return ""
        raise ImageError(f"credentials {path}: {error}") from error
    names = (host, f"https://{host}", *(_HUB_NAMES if host == DOCKER_HUB else ()))
    entry = next((auths[name] for name in names if name in auths), {})
    word = str(entry.get("auth", ""))
    if not word and "username" in entry:
        pair = f"{entry['username']}:{entry.get('password', '')}"
        word = base64.b64encode(pair.encode()).decode()
    try:
        base64.b64decode(word, validate=True)
    except binascii.Error as error:
        raise ImageError(f"credentials {file}: auths.{host}.auth: expected base64") from error
    return word


class RegistrySource:
    """An image in a registry; see `sources.ImageSource`.

    Args:
        reference: Of the image.
        scratch: Folder for blobs.
        credentials: See `read_credentials`.
        say: Function that shows one line of progress.

    Raises:
        ImageError: The reference is invalid, or the credentials are damaged.

    """

    def __init__(self, reference: str, scratch: Path, credentials: Path | None, say: Say) -> None:
        self._at = parse_reference(reference)
        self._basic = read_credentials(credentials, self._at.host)
        self._scratch, self._say = scratch, say
        self._authorization = ""

    async def config(self) -> tuple[ImageConfig, list[Descriptor]]:
        """See `ImageSource.config`."""
        version = self._at.version
        digest = Descriptor(digest=version) if version.startswith("sha256:") else None
        for _ in range(INDEX_DEPTH_MAX):
            found = decoded(await self._manifest(version, digest), ImageManifest, "manifest")
            if found.config is not None:
                path = await self._blob(found.config, MANIFEST_BYTES_MAX)
                config = decoded(path.read_bytes(), ImageConfig, "config")
                return config, checked(config, found.layers)
            if not found.manifests:
                break
            digest = chosen(found, self._at.name)
            version = digest.digest
        raise ImageError(f"{self._at.name}: expected an image or an index of images")

    async def layer(self, layer: Descriptor) -> Path:
        """See `ImageSource.layer`."""
        return await self._blob(layer, LAYER_BYTES_MAX)

    async def _manifest(self, version: str, digest: Descriptor | None) -> bytes:
        path = self._scratch / "manifest"
        await self._get(f"manifests/{quote(version, safe=':')}", path, MANIFEST_BYTES_MAX, digest)
        return path.read_bytes()

    async def _blob(self, blob: Descriptor, bytes_max: int) -> Path:
        if not 0 <= blob.size <= bytes_max:
            raise ImageError(f"blob {blob.digest[:80]}: {blob.size} bytes; {bytes_max} at most")
        path = self._scratch / f"blob-{blob.hex}"
        await self._get(f"blobs/{blob.digest}", path, blob.size, blob)
        return path

    async def _get(
        self, what: str, target: Path, bytes_max: int, digest: Descriptor | None
    ) -> None:
        """Fetch one file of the repository; retry temporary failures."""
        url = self._at.origin / "v2" / self._at.name / what
        deadline_s = 60.0 + bytes_max / BYTES_PER_S_MIN
        for last in (False,) * (TRIES_MAX - 1) + (True,):
            try:
                async with asyncio.timeout(deadline_s), self._session() as session:
                    return await self._fetch(session, url, target, bytes_max, digest)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                words = f"{self._at.host}: {what[:100]}: {type(error).__name__} {error}".strip()
                log.warning("registry %s", words)
                if last:
                    raise RegistryError(words) from error
                self._say(f"image: {words}; trying again")
                await asyncio.sleep(RETRY_S)

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_S_MAX, sock_read=STALL_S_MAX
        )
        # Digests are of the bytes as sent, so the registry's own compression is not undone.
        return aiohttp.ClientSession(timeout=timeout, trust_env=True, auto_decompress=False)

    async def _fetch(
        self,
        session: aiohttp.ClientSession,
        url: URL,
        target: Path,
        bytes_max: int,
        digest: Descriptor | None,
    ) -> None:
        state, num_bytes = hashlib.sha256(), 0
        async with self._answer(session, url) as answer:
            if answer.status in _BUSY:
                raise aiohttp.ClientPayloadError(f"status {answer.status}")
            if answer.status != _OK:
                raise RegistryError(f"{self._at.host}: {url.path[:200]}: status {answer.status}")
            with target.open("wb") as file:
                async for piece in answer.content.iter_chunked(_PIECE):
                    num_bytes += len(piece)
                    if num_bytes > bytes_max:
                        raise ImageError(f"{url.path[:200]}: more than its {bytes_max} bytes")
                    state.update(piece)
                    file.write(piece)
        if digest is not None and state.hexdigest() != digest.hex:
            raise ImageError(f"the content of {digest.digest} does not match its digest")

    @contextlib.asynccontextmanager
    async def _answer(
        self, session: aiohttp.ClientSession, url: URL
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, with a token if the registry demands one, and follow redirects."""
        num_redirects, has_asked, at = 0, False, url
        while True:
            is_own = at.origin() == url.origin()
            headers = {"Accept": _KINDS}
            if is_own and self._authorization:
                headers["Authorization"] = self._authorization
            async with session.get(at, headers=headers, allow_redirects=False) as answer:
                if answer.status == _UNAUTHORIZED and is_own and not has_asked:
                    has_asked = True
                    challenge = answer.headers.get("WWW-Authenticate", "")
                elif answer.status in _REDIRECTS:
                    num_redirects += 1
                    at = self._redirected(at, answer.headers.get("Location", ""), num_redirects)
                    continue
                else:
                    yield answer
                    return
            self._authorization = await self._authorize(session, challenge)

    def _redirected(self, at: URL, location: str, number: int) -> URL:
        try:
            to = at.join(URL(location))
        except ValueError as error:
            raise RegistryError(f"{self._at.host}: leads to {location[:200]!r}") from error
        if number > REDIRECTS_MAX or not location:
            raise RegistryError(f"{self._at.host}: more than {REDIRECTS_MAX} redirects, or to none")
        self._check_address(to)
        return to

    def _check_address(self, to: URL) -> None:
        """Refuse a redirect to an address on this host or its private network."""
        if to.scheme != "https" and to.origin() != self._at.origin:
            raise RegistryError(f"{self._at.host}: leads to {to.origin()}; expected https")
        try:
            is_private = not ipaddress.ip_address(to.host or "").is_global
        except ValueError:
            return  # A name, not an address.
        if is_private and to.host != self._at.origin.host:
            raise RegistryError(f"{self._at.host}: leads to the private address {to.host}")

    async def _authorize(self, session: aiohttp.ClientSession, challenge: str) -> str:
        kind, _, rest = challenge[:4_000].partition(" ")
        basic = f"Basic {self._basic}" if self._basic else ""
        if kind.lower() == "basic" and basic:
            return basic
        fields = dict(_CHALLENGE.findall(rest))
        if kind.lower() != "bearer" or "realm" not in fields:
            raise RegistryError(f"{self._at.host}: wants credentials; name a file that has them")
        query = {"service": fields.get("service", ""),
                 "scope": fields.get("scope", f"repository:{self._at.name}:pull")}  # fmt: skip
        try:
            realm = URL(fields["realm"])
            self._check_address(realm)
            url = realm.update_query(urlencode(query))
        except ValueError as error:
            if isinstance(error, RegistryError):
                raise
            raise RegistryError(f"{self._at.host}: realm {fields['realm'][:100]!r}") from error
        headers = {"Authorization": basic} if basic else {}
        async with session.get(url, headers=headers, allow_redirects=False) as answer:
            data = b""
            async for piece in answer.content.iter_chunked(TOKEN_BYTES_MAX):
                data += piece
                if len(data) > TOKEN_BYTES_MAX:
                    raise RegistryError(f"{url.host}: a token of more than {TOKEN_BYTES_MAX} bytes")
            if answer.status in _BUSY:
                raise aiohttp.ClientPayloadError(f"token service: status {answer.status}")
            if answer.status != _OK:
                raise RegistryError(f"{url.host}: no token, status {answer.status}")
        token = decoded(data, dict[str, Any], "token")
        return f"Bearer {token.get('token') or token.get('access_token') or ''}"
