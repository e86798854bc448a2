"""The page and the state behind it: who may look, and what a string in them may do."""

import asyncio
import base64
import gzip
import json

import aiohttp
import pytest
from tests.e2e.gateway.conftest import OPERATOR, SECRET

from penstock.gateway.page.live_page import render_page, script_json

VIEWS = ("/", "/metrics", "/v1/monitor/state", "/v1/monitor/events")
ELSEWHERE = [
    {"Host": "evil.example"},
    {"Host": "localhost.evil.example"},
    {"Host": "127.0.0.1.evil.example:80"},
    {"Host": ""},
    {"X-Forwarded-For": "203.0.113.7"},
    {"Forwarded": "for=203.0.113.7"},
    {"Via": "1.1 proxy"},
    {"X-Real-IP": "203.0.113.7"},
]


@pytest.fixture
async def http(site):
    async with aiohttp.ClientSession(site.url) as session:
        yield session


@pytest.mark.parametrize("headers", ELSEWHERE, ids=str)
async def test_another_sites_page_and_a_proxys_user_see_nothing_without_a_key(http, headers):
    for path in VIEWS:
        async with http.get(path, headers=headers) as reply:
            assert reply.status == 401, path
            assert reply.headers["WWW-Authenticate"].startswith("Basic")


@pytest.mark.parametrize(
    "head",
    ["HTTP/1.0\r\nHost: localhost:8000", "HTTP/1.0", "HTTP/1.1\r\nHost: 127.0.0.\u0661",
     "HTTP/1.1\r\nHost: localhost.", "HTTP/1.1\r\nHost: 2130706433",
     "HTTP/1.1\r\nHost: evil.example\r\nUpgrade: websocket"],
)  # fmt: skip
async def test_neither_a_plain_proxy_nor_another_spelling_is_this_machine(site, head):
    address = site.url.partition("//")[2].partition("/")[0]
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(f"GET /v1/monitor/state {head}\r\nConnection: close\r\n\r\n".encode())
    async with asyncio.timeout(10.0):
        first = await reader.readline()
    writer.close()
    assert b" 401 " in first


def credentials(scheme, secret):
    basic = base64.b64encode(f"anyone:{secret}".encode()).decode()
    return {"Authorization": f"{scheme} {secret if scheme == 'Bearer' else basic}"}


@pytest.mark.parametrize("scheme", ["Bearer", "Basic"])
async def test_an_operator_s_key_shows_a_proxys_user_the_run_and_a_tenant_s_does_not(http, scheme):
    for path in VIEWS:
        for secret, status in ((OPERATOR, 200), (SECRET, 403)):
            headers = {"X-Forwarded-For": "203.0.113.7"} | credentials(scheme, secret)
            async with http.get(path, headers=headers) as reply:
                assert reply.status == status, path
                if status == 403:
                    assert (await reply.json())["error"]["code"] == "not_an_operator"


CREDENTIALS = ["Basic", "Basic !!!", "Basic " + base64.b64encode(b"\xff\xfe:\xff").decode(),
               "Basic " + base64.b64encode(b"no colon").decode(), "Bearer  ", "Bearer caf\udce9",
               "Digest x", " "]  # fmt: skip


@pytest.mark.parametrize("given", CREDENTIALS)
async def test_odd_credentials_are_refused(http, given):
    headers = {"Host": "evil.example", "Authorization": given}
    async with http.get("/v1/monitor/state", headers=headers) as reply:
        assert reply.status == 401
    async with http.get("/v1/models", headers={"Authorization": given}) as reply:
        assert reply.status == 401


TRICKS = ["</script><script>alert(1)</script>", "<!--<script>", "]]>", "\u2028", "\u2029", "<\0>"]


@pytest.mark.parametrize("text", TRICKS)
def test_a_string_of_the_state_cannot_leave_its_script(text):
    data = json.dumps({"categories": {text: 1}}, ensure_ascii=False).encode()
    safe = script_json(data)
    assert json.loads(safe) == {"categories": {text: 1}}
    assert not set(safe) & {"<", "\u2028", "\u2029"}
    page = render_page(data)
    assert page.count("<script") == render_page().count("<script")
    assert page.count("<!--") == render_page().count("<!--")


BODIES = {
    "not UTF-8": b'{"model": "\xff"}',
    "a lone surrogate": b'{"model": "policy", "messages": [{"role": "user", "content": "'
    + b'\\ud800"}]}',
    "deep": b"[" * 100_000,
    "deep tools": b'{"model": "policy", "messages": [{"role": "user", "content": "x"}], "tools": '
    + b'[{"a":' * 5_000 + b"1" + b"}]" * 5_000 + b"}",
    "a huge number": b'{"model": "policy", "seed": 1' + b"0" * 5000 + b"}",
    "infinite": b'{"model": "policy", "temperature": 1e999}',
    "a null": b"null",
    "empty": b"",
}  # fmt: skip
POSTS = ("/v1/chat/completions", "/v1/feedback")


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("path", POSTS)
async def test_an_odd_body_is_the_senders_error(http, path, body):
    headers = {"Authorization": f"Bearer {SECRET}"}
    async with http.post(path, data=body, headers=headers) as reply:
        assert 400 <= reply.status < 500, await reply.text()


HEADERS = [
    {"Content-Type": "application/json; charset=no-such"},
    {"Content-Encoding": "gzip"},
    {"Content-Encoding": "br"},
    {"Idempotency-Key": "a b\tc"},
    {"Idempotency-Key": "x" * 5_000},
    {"X-Session-Id": "caf\udce9 .*.>"},
]


@pytest.mark.parametrize("extra", HEADERS, ids=str)
@pytest.mark.parametrize("path", POSTS)
async def test_an_odd_header_is_the_senders_error(http, path, extra):
    headers = {"Authorization": f"Bearer {SECRET}", **extra}
    async with http.post(path, data=b'{"model": "no"}', headers=headers) as reply:
        assert 400 <= reply.status < 500, await reply.text()


async def test_a_compressed_bomb_is_the_senders_error(http):
    bomb = gzip.compress(bytes(64 << 20))
    headers = {"Authorization": f"Bearer {SECRET}", "Content-Encoding": "gzip"}
    async with http.post("/v1/chat/completions", data=bomb, headers=headers) as reply:
        assert reply.status == 413


@pytest.mark.parametrize("name", ["%ff%fe", "a%00b", "..%2f..", "%2e%2e", "x" * 3000, "*.%3E"])
async def test_an_odd_feedback_id_is_the_senders_error(http, name):
    headers = {"Authorization": f"Bearer {SECRET}"}
    for method in ("PATCH", "DELETE"):
        url = f"/v1/feedback/{name}"
        async with http.request(method, url, json={"value": 1.0}, headers=headers) as reply:
            assert 400 <= reply.status < 500, await reply.text()
