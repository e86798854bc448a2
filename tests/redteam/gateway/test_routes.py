"""Hostile requests on every route: typed errors in the route's form, and others are served."""

import asyncio
import gzip
import json
import random

import aiohttp
import pytest
from tests.e2e.gateway.conftest import Reply, Site
from tests.property.test_gateway_bodies import CALL, FUNCTION, SEEDS

HEADERS = {"Authorization": "Bearer psk-test", "Content-Type": "application/json"}
SESSION = {
    "session_id": "s",
    "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
        {"role": "assistant", "content": "x"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "outcome": [{"name": "commit", "value": 1, "comment": "x"}],
    "user": "x",
}
BODIES = SEEDS | {"/v1/sessions": SESSION}
GOOD = {path: body | {"stream": False} for path, body in SEEDS.items()} | {"/v1/sessions": SESSION}
DEEP = b'{"model":"policy","messages":' + b"[" * 5000 + b"]" * 5000 + b"}"


class Endless(list):
    """A script without end."""

    def __init__(self, token_ids: list[int]) -> None:
        super().__init__()
        self._token_ids = token_ids

    def pop(self, _index: int = 0) -> Reply:
        return Reply(token_ids=self._token_ids)


def attacks(rng: random.Random, body: dict) -> tuple[bytes, dict[str, str]]:
    """Return the bytes and headers of a request that was changed on its way."""
    data = json.dumps(body).encode()
    match rng.randrange(9):
        case 0:
            return data[: rng.randrange(len(data))], {}
        case 1:
            return data, {"Content-Encoding": rng.choice(["gzip", "deflate", "br", "zstd", "x"])}
        case 2:
            return gzip.compress(data)[:-5], {"Content-Encoding": "gzip"}
        case 3:
            place = rng.randrange(len(data))
            return data[:place] + rng.randbytes(3) + data[place:], {}
        case 4:
            return DEEP, {}
        case 5:
            return data.replace(b'"x"', b'"' + rng.choice([b"\\ud800", b"\\u0000"]) + b'"'), {}
        case 6:
            return data, {"X-Session-Id": "s" * rng.choice([1, 257, 4000])}
        case 7:
            return data.replace(b":", b":" + b"9" * 400, 1), {}
        case _:
            return data, {"Authorization": rng.choice(["", "Bearer", "Basic x", "Bearer é"])}


def check_error(path: str, error: dict) -> None:
    if path.startswith("/v1/messages"):
        assert (error["type"], set(error["error"])) == ("error", {"type", "message"})
    else:
        assert set(error["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("seed", range(3))
async def test_no_request_breaks_a_route_and_the_next_is_answered(bus, tmp_path, tokenizer, seed):
    site = Site(bus, tmp_path, tokenizer, body_s_max=1.0)
    site.generator.replies = Endless(site.chat.render_turn("ok"))
    rng = random.Random(seed)
    async with site.running(), aiohttp.ClientSession(site.url) as http:
        for _ in range(40):
            path = rng.choice(sorted(BODIES))
            data, headers = attacks(rng, BODIES[path])
            async with asyncio.timeout(20):
                reply = await http.post(path, data=data, headers=HEADERS | headers)
                text = await reply.text()
            assert reply.status in {200, 400, 401, 404, 413, 415}, (path, data[:200], headers, text)
            assert reply.headers["x-request-id"]
            if reply.status != 200:
                check_error(path, json.loads(text))
        for path, body in GOOD.items():
            reply = await http.post(path, json=body, headers=HEADERS)
            assert reply.status == 200, (path, await reply.text())
