"""What the gateway refuses, limits and reports, over plain HTTP."""

import asyncio
import io

import aiohttp
import msgspec
import pytest

from penstock.actors.monitor.actor import Monitor
from penstock.gateway.config import GatewayConfig
from penstock.messages.feedback import FeedbackReceived, FeedbackRetracted

from .conftest import OPERATOR, Site, reported, until

GOOD = {"model": "policy", "messages": [{"role": "user", "content": "Fix add."}]}


@pytest.fixture
async def http(site):
    async with aiohttp.ClientSession(site.url) as session:
        yield session


def bearer(secret: str = "psk-test") -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


async def chat(http, body, secret="psk-test", **options):
    return await http.post("/v1/chat/completions", json=body, headers=bearer(secret), **options)


async def test_bad_requests_name_their_field(site, http):
    cases = [
        ({}, "model"),
        (GOOD | {"model": "gpt"}, "model"),
        (GOOD | {"messages": []}, "messages"),
        (GOOD | {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (GOOD | {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (GOOD | {"max_tokens": "many"}, "max_tokens"),
        (GOOD | {"max_tokens": 0}, "max_tokens"),
        (GOOD | {"max_tokens": 10**6, "messages": GOOD["messages"] * 400}, "messages"),
        (GOOD | {"temperature": -1}, "temperature"),
        (GOOD | {"top_p": 0}, "top_p"),
        (GOOD | {"n": 9}, "n"),
        (GOOD | {"stop": ["x"] * 17}, "stop"),
        (GOOD | {"modalities": ["audio"]}, "modalities"),
        (GOOD | {"response_format": {"type": "json_schema"}}, SCHEMA_PARAM),
        (GOOD | {"tools": [TOOL] * 2}, "tools[1]"),
        (GOOD | {"tools": [nested()]}, None),
        (GOOD | {"tool_choice": "required"}, "tool_choice"),
        (
            GOOD | {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content[0].type",
        ),
        (GOOD | {"top_logprobs": 5}, "top_logprobs"),
        (GOOD | {"tools": [{"type": "function"}]}, "tools[0].function"),
    ]
    codes = {}
    for body, param in cases:
        reply = await chat(http, body)
        error = (await reply.json())["error"]
        assert reply.status in {400, 404}, (body, error)
        assert error["param"] == param, (body, error)
        assert error["message"]
        codes[param] = error["code"]
    assert (codes["model"], codes["messages"]) == ("model_not_found", "context_length_exceeded")
    assert not site.generator.asked


SCHEMA_PARAM = "response_format.json_schema.schema"
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
TOOL = {"type": "function", "function": {"name": "x"}}


def nested() -> dict:
    """Return a tool whose schema msgspec decodes and recursive code would not."""
    schema: dict = {}
    for _ in range(400):
        schema = {"properties": schema}
    return {"type": "function", "function": {"name": "x", "parameters": schema}}


VIEWS = ("/", "/metrics", "/v1/monitor/state", "/v1/monitor/events")


async def test_on_this_machine_anyone_may_look(http):
    for path in VIEWS:
        reply = await http.get(path)
        assert reply.status == 200, path
        reply.close()


async def test_beyond_this_machine_looking_takes_a_key(bus, tmp_path, tokenizer):
    site = Site(bus, tmp_path, tokenizer, host="0.0.0.0")
    async with site.running(Monitor()):
        url = site.url.replace("0.0.0.0", "127.0.0.1")
        async with aiohttp.ClientSession(url) as http:
            for path in VIEWS:
                assert (await http.get(path)).status == 401, path
                assert (await http.get(path, headers=bearer())).status == 403, path
                reply = await http.get(path, headers=bearer(OPERATOR))
                assert reply.status == 200, path
                reply.close()
            assert (await http.get("/healthz")).status == 200


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
    ],
)
def test_what_is_local(host, is_local):
    assert GatewayConfig(host=host).is_local == is_local


async def test_wrong_keys_bodies_and_paths_are_errors_in_openai_form(site, http):
    no_key = await http.post("/v1/chat/completions", json=GOOD)
    wrong = await chat(http, GOOD, secret="psk-wrong")
    garbage = await http.post("/v1/chat/completions", data=b"{nope", headers=bearer())
    large = await http.post(
        "/v1/chat/completions", data=io.BytesIO(b"x" * (3 << 20)), headers=bearer()
    )
    nowhere = await http.get("/v1/nothing")
    statuses = [r.status for r in (no_key, wrong, garbage, large, nowhere)]
    assert statuses == [401, 401, 400, 413, 404]
    for reply in (no_key, wrong, garbage, large, nowhere):
        error = (await reply.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert reply.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/batches", "/v1/x"])
async def test_a_route_that_is_not_here_is_refused_with_those_that_are(http, path):
    reply = await http.post(path, json={"model": "policy", "input": "x"}, headers=bearer())
    error = (await reply.json())["error"]
    assert (reply.status, error["code"]) == (404, "unknown_route")
    assert path in error["message"]
    assert "/v1/chat/completions" in error["message"]


async def test_a_key_s_rate_is_limited_and_said_in_headers(site, http):
    for _ in range(2):
        site.will_reply(site.chat.render_turn("ok"))
        reply = await chat(http, GOOD, secret="psk-slow")
        assert reply.status == 200
        assert reply.headers["x-ratelimit-limit-requests"] == "2"
        assert reply.headers["x-policy-version"] == "7"
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    refused = await chat(http, GOOD, secret="psk-slow")
    assert refused.status == 429
    assert int(refused.headers["Retry-After"]) >= 1
    assert (await refused.json())["error"]["code"] == "rate_limit_exceeded"


async def test_a_key_s_parallel_requests_are_limited(site, http):
    site.generator.gate.clear()
    site.will_reply(site.chat.render_turn("ok"))
    async with asyncio.TaskGroup() as group:
        first = group.create_task(chat(http, GOOD, secret="psk-single"))
        await until(lambda: site.generator.asked)
        refused = await chat(http, GOOD, secret="psk-single")
        assert refused.status == 429
        assert (await refused.json())["error"]["code"] == "too_many_parallel_requests"
        site.generator.gate.set()
    assert first.result().status == 200


async def test_feedback_is_checked_amended_and_retracted(site, http):
    site.will_reply(site.chat.render_turn("ok"))
    headers = bearer("psk-private") | {"X-Session-Id": "s1"}
    request_id = (
        await (await http.post("/v1/chat/completions", json=GOOD, headers=headers)).json()
    )["id"]
    cases = [
        ({"request_id": request_id, "name": "accept"}, 400, "value"),
        ({"request_id": request_id, "name": "a b", "value": 1}, 400, "name"),
        ({"request_id": request_id, "value": 1}, 400, "name"),
        ({"name": "accept", "value": 1}, 400, "request_id"),
        ({"session_id": "s2", "name": "accept", "value": 1}, 404, "session_id"),
        ({"request_id": request_id, "name": "accept", "value": 1, "weight": 2}, 400, "weight"),
        ({"request_id": request_id, "name": "accept", "value": 3}, 400, "value"),
        ({"request_id": request_id, "name": "undo", "value": 0.5}, 400, "value"),
        ({"request_id": request_id, "name": "vibes", "value": 1}, 400, "name"),
        ({"request_id": request_id, "name": "correction"}, 400, "correction"),
    ]
    for body, status, param in cases:
        reply = await http.post("/v1/feedback", json=body, headers=headers)
        assert (reply.status, (await reply.json())["error"]["param"]) == (status, param)
    body = {"session_id": "s1", "key": "thumbs", "score": True, "feedback_id": "f1"}
    foreign = await http.post(
        "/v1/feedback", json=body | {"session_id": "", "request_id": request_id}, headers=bearer()
    )
    assert foreign.status == 403
    reply = await http.post("/v1/feedback", json=body, headers=headers)
    assert (await reply.json())["request_id"] == request_id

    assert (await http.patch("/v1/feedback/f1", json={}, headers=headers)).status == 400
    assert (await http.patch("/v1/feedback/f1", json={"value": 0}, headers=headers)).status == 200
    assert (await http.delete("/v1/feedback/f1", headers=bearer())).status == 404
    assert (await http.delete("/v1/feedback/f1", headers=headers)).status == 200
    first, amended = await site.events(FeedbackReceived)
    assert (first.name, first.value, first.amends) == ("thumbs", 1.0, "")
    assert amended.value == 0.0
    (retracted,) = await site.events(FeedbackRetracted)
    assert retracted.feedback_id == amended.amends


async def test_readiness_metrics_state_and_page(site, http):
    assert (await http.get("/healthz")).status == 200

    async def readiness(status):
        async with asyncio.timeout(20):
            while (ready := await http.get("/readyz")).status != status:
                await asyncio.sleep(0.05)
        return await ready.json()

    assert (await readiness(200))["policy_version"] == 7
    site.generator.policy_version = -1
    await site.bus.publish([msgspec.structs.replace(reported(7), is_leaving=True)])
    await readiness(503)
    site.generator.policy_version = 3
    assert (await readiness(200))["policy_version"] == 3
    text = await (await http.get("/metrics")).text()
    assert 'penstock_gateway_requests_total{route="/readyz",status="200"}' in text
    assert 'penstock_served_version{region="west",replica="west"} 3.0' in text
    state = await (await http.get("/v1/monitor/state")).json()
    assert state["regions"]["west"]["replicas"] == {"west": 3}
    page = await http.get("/")
    assert page.content_type == "text/html"
    assert "EMBEDDED = null" in await page.text()


async def test_viewers_get_the_whole_state_then_only_what_changed(site, http):
    async with http.get("/v1/monitor/events") as stream:
        first = await next_event(stream)
        assert {"run", "steps", "ledger", "actors"} <= set(first)
        second = await next_event(stream)
        assert "run" in second
        assert "midtrain" not in second


async def next_event(stream) -> dict:
    import json

    async with asyncio.timeout(20):
        while True:
            line = await stream.content.readline()
            if line.startswith(b"data: "):
                return json.loads(line[6:])


async def test_a_batch_of_feedback_is_taken_item_by_item_and_tells_its_fate(site, http):
    site.will_reply(site.chat.render_turn("ok"))
    request_id = (await (await chat(http, GOOD)).json())["id"]
    items = [
        {"request_id": request_id, "name": "thumbs", "value": True, "feedback_id": "b1"},
        {"request_id": request_id, "name": "vibes", "value": 1},
        "no object",
        {"request_id": request_id, "name": "comment", "comment": "why?", "feedback_id": "b2"},
    ]
    reply = await http.post("/v1/feedback/batch", json={"items": items}, headers=bearer())
    assert reply.status == 200
    first, undeclared, broken, comment = (await reply.json())["results"]
    assert first == {"feedback_id": "b1", "request_id": request_id, "duplicate": False}
    assert (undeclared["status"], undeclared["error"]["code"]) == (400, "undeclared_signal")
    assert "thumbs" in undeclared["error"]["message"], "the declared ones are named"
    assert (broken["status"], comment["feedback_id"]) == (400, "b2")
    for wrong in ({"items": []}, {"items": items * 65}, {"item": []}, []):
        refused = await http.post("/v1/feedback/batch", json=wrong, headers=bearer())
        assert refused.status == 400

    async def fate_of(feedback_id):
        return await (await http.get(f"/v1/feedback/{feedback_id}", headers=bearer())).json()

    async with asyncio.timeout(20):
        while (fate := await fate_of("b1"))["status"] != "joined":
            await asyncio.sleep(0.05)
    assert (fate["name"], fate["value"], fate["versions"]) == ("thumbs", 1.0, [])
    assert (await fate_of("b2"))["status"] == "recorded"
    assert (await http.get("/v1/feedback/none", headers=bearer())).status == 404
    foreign = await http.get("/v1/feedback/b1", headers=bearer("psk-private"))
    assert foreign.status == 404
