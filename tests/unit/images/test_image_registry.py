"""A registry, well-behaved and not: the distribution protocol, tokens, redirects, bounds."""

import asyncio
import base64
import contextlib
import json

import pytest
from aiohttp import web
from tests.support.container_images import Image, tar_of

from penstock.envs.microvm.images.layers import load_image, load_layer
from penstock.envs.microvm.oci import registry
from penstock.envs.microvm.oci.build import BuildOptions
from penstock.envs.microvm.oci.prepare import pull_image
from penstock.envs.microvm.oci.registry import RegistryError, parse_reference
from penstock.envs.microvm.oci.tree import ImageError

BASIC = "Basic " + base64.b64encode(b"me:secret").decode()


class Registry:
    """A registry of one image, which asks for a token; `misbehave` sees each request first."""

    def __init__(self, image, misbehave=None):
        self.image, self.misbehave = image, misbehave
        self.asked = []

    async def answer(self, request):
        self.asked.append((request.path, request.headers.get("Authorization", "")))
        if self.misbehave and (odd := await self.misbehave(self, request)) is not None:
            return odd
        if request.path == "/token":
            if request.headers.get("Authorization") != BASIC:
                return web.Response(status=401)
            return web.json_response({"token": "t0"})
        if request.headers.get("Authorization") != "Bearer t0":
            realm = f'Bearer realm="http://{request.host}/token",service="here"'
            return web.Response(status=401, headers={"WWW-Authenticate": realm})
        name = request.path.rpartition("/")[2]
        if request.path == "/v2/team/tool/manifests/1.0":
            return web.Response(body=self.image.index)
        if name in self.image.blobs:
            return web.Response(body=self.image.blobs[name])
        return web.Response(status=404)


@contextlib.asynccontextmanager
async def served(image, misbehave=None):
    one = Registry(image, misbehave)
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", one.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    one.host = f"127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    try:
        yield one
    finally:
        await runner.cleanup()


async def pull(one, tmp_path, name="team/tool:1.0", auth="me:secret"):
    config = tmp_path / "config.json"
    word = base64.b64encode(auth.encode()).decode()
    config.write_text(json.dumps({"auths": {one.host: {"auth": word}}}))
    options = BuildOptions(cache=tmp_path / "vm", credentials=config)
    return await pull_image(f"{one.host}/{name}", name="x", options=options, say=lambda _: None)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(registry, "RETRY_S", 0.0)


@pytest.fixture
def image():
    return Image([tar_of(a="1"), tar_of(b="2")])


async def test_an_image_is_pulled_with_a_token_and_each_layer_once(tmp_path, image):
    async with served(image) as one:
        await pull(one, tmp_path)
        path, _ = load_layer("x", tmp_path / "vm")
        assert len(load_image(path).layers) == 3
        num_asked = len(one.asked)
        await pull(one, tmp_path)
        blobs = [path for path, _ in one.asked[num_asked:] if "/blobs/" in path]
        assert {path.rpartition("/")[2] for path in blobs} == {image.config["digest"]}


async def test_a_pull_by_digest_verifies_the_manifest(tmp_path, image):
    async with served(image) as one:
        await pull(one, tmp_path, f"team/tool@{image.manifest['digest']}")
        digest = image.manifest["digest"]
        image.blobs[digest] += b" "
        with pytest.raises(ImageError, match="does not match its digest"):
            await pull(one, tmp_path, f"team/tool@{digest}")


def answer_for(part, make):
    async def misbehave(one, request):
        return await make(one, request) if part in request.path else None

    return misbehave


async def _other_bytes(one, request):
    return web.Response(body=b"x" * one.image.layers[0]["size"])


async def _too_many(one, request):
    return web.Response(body=b"x" * (6 << 20))


async def _to_private(one, request):
    return web.Response(status=307, headers={"Location": "https://192.0.2.1/secret"})


async def _to_plain(one, request):
    return web.Response(status=302, headers={"Location": "http://elsewhere.test/x"})


async def _in_circles(one, request):
    return web.Response(status=302, headers={"Location": str(request.url)})


async def _nowhere(one, request):
    return web.Response(status=302)


async def _teapot(one, request):
    return web.Response(status=418)


async def _busy(one, request):
    return web.Response(status=503)


async def _stalls(one, request):
    answer = web.StreamResponse()
    await answer.prepare(request)
    await answer.write(b"x")
    await asyncio.sleep(30)
    return answer


async def _cut(one, request):
    answer = web.StreamResponse(headers={"Content-Length": "1000"})
    await answer.prepare(request)
    await answer.write(b"x")
    request.transport.close()
    return answer


@pytest.mark.parametrize(
    ("part", "make", "kind", "words"),
    [
        ("/blobs/", _other_bytes, ImageError, "its digest|more than its"),
        ("/blobs/", _too_many, ImageError, "more than its"),
        ("/manifests/", _too_many, ImageError, "more than its"),
        ("/blobs/", _to_private, RegistryError, "private address"),
        ("/blobs/", _to_plain, RegistryError, "expected https"),
        ("/manifests/", _in_circles, RegistryError, "redirects"),
        ("/manifests/", _nowhere, RegistryError, "redirects, or to none"),
        ("/manifests/", _teapot, RegistryError, "status 418"),
        ("/manifests/", _busy, RegistryError, "status 503"),
        ("/blobs/", _stalls, RegistryError, "Timeout"),
        ("/blobs/", _cut, RegistryError, "ClientPayloadError"),
        ("/token", _teapot, RegistryError, "no token"),
        ("/token", _too_many, RegistryError, "a token of more"),
    ],
)
async def test_a_registry_that_misbehaves_is_refused_and_nothing_is_left(
    tmp_path, image, monkeypatch, part, make, kind, words
):
    monkeypatch.setattr(registry, "STALL_S_MAX", 0.3)
    async with served(image, answer_for(part, make)) as one:
        with pytest.raises(kind, match=words):
            await pull(one, tmp_path)
    assert [path.name for path in (tmp_path / "vm" / "images").iterdir()] == ["build.lock"]


async def test_what_is_temporary_is_tried_again(tmp_path, image):
    seen = []

    async def misbehave(one, request):
        seen.append(request.path)
        return web.Response(status=503) if len(seen) == 1 else None

    async with served(image, misbehave) as one:
        await pull(one, tmp_path)


async def test_credentials_stay_with_their_registry(tmp_path, image):
    async with served(image) as other, served(image) as one:

        async def misbehave(_, request):
            if "/blobs/" in request.path:
                return web.Response(status=307, headers={"Location": f"http://{other.host}/x"})
            return None

        one.misbehave = misbehave
        with pytest.raises(RegistryError, match="expected https"):
            await pull(one, tmp_path)
        assert other.asked == []


async def test_wrong_credentials_are_refused(tmp_path, image):
    async with served(image) as one:
        with pytest.raises(RegistryError, match="no token, status 401"):
            await pull(one, tmp_path, auth="me:wrong")


async def test_a_registry_that_is_not_there_is_named(tmp_path, image):
    async with served(image) as one:
        pass
    with pytest.raises(RegistryError, match=one.host):
        await pull(one, tmp_path)


@pytest.mark.parametrize(
    ("text", "host", "name", "version"),
    [
        ("python", registry.DOCKER_HUB, "library/python", "latest"),
        ("a/b:1", registry.DOCKER_HUB, "a/b", "1"),
        ("docker.io/x", registry.DOCKER_HUB, "library/x", "latest"),
        ("ghcr.io/a/b__c.d:T-1", "ghcr.io", "a/b__c.d", "T-1"),
        ("localhost:5000/a", "localhost:5000", "a", "latest"),
        (f"h.test/a:t@sha256:{'0' * 64}", "h.test", "a", f"sha256:{'0' * 64}"),
    ],
)
def test_references_mean_what_they_mean_elsewhere(text, host, name, version):
    found = parse_reference(text)
    assert (found.host, found.name, found.version) == (host, name, version)


@pytest.mark.parametrize(
    "text", ["", "A", "a b", "a:", "../x", "h.test/", "a@sha256:12", "http://x"]
)
def test_no_reference_is_refused(text):
    with pytest.raises(ImageError, match="expected"):
        parse_reference(text)
