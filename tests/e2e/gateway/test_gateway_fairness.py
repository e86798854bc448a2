"""What one key may store as feedback, and whose feedback counts."""

import aiohttp
import msgspec
import pytest

from penstock.actors.feedback.actor import FeedbackJoiner
from penstock.actors.feedback.config import JoinConfig
from penstock.gateway.keys import KeySpec, hash_key
from penstock.messages.feedback import FeedbackReceived, InferenceRecorded, LiveSampleJoined
from penstock.messages.streams import STREAMS

from .conftest import KEYS, Site

GOOD = {"model": "policy", "messages": [{"role": "user", "content": "Fix add."}]}


def bearer(secret: str = "psk-test") -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


async def ask(site: Site, http: aiohttp.ClientSession) -> str:
    site.will_reply(site.chat.render_turn("ok"))
    reply = await http.post("/v1/chat/completions", json=GOOD, headers=bearer())
    assert reply.status == 200
    return (await reply.json())["id"]


async def test_a_flood_of_feedback_is_refused_before_it_is_stored(site):
    async with aiohttp.ClientSession(site.url) as http:
        body = {"request_id": await ask(site, http), "name": "accept", "value": 1}
        body |= {"comment": "x" * 16_000}
        statuses = [
            (await http.post("/v1/feedback", json=body, headers=bearer())).status
            for _ in range(100)
        ]
        reply = await http.post("/v1/feedback", json=body, headers=bearer())
        error = (await reply.json())["error"]
    assert statuses[0] == 200
    assert error["code"] == "feedback_limit_exceeded" and int(reply.headers["Retry-After"]) > 0
    assert "256 KiB" in error["message"]
    assert len(await site.events(FeedbackReceived)) == statuses.count(200) <= 18


@pytest.fixture
def small(monkeypatch):
    """Have the stream of signals hold little."""
    spec = STREAMS[FeedbackReceived.stream]
    small = msgspec.structs.replace(spec, max_bytes=4000)
    monkeypatch.setitem(STREAMS, FeedbackReceived.stream, small)


async def test_a_full_stream_of_signals_refuses_no_record_of_a_request(small, site):
    async with aiohttp.ClientSession(site.url) as http:
        body = {"request_id": await ask(site, http), "name": "accept", "value": 1}
        body |= {"comment": "x" * 1000}
        statuses = [
            (await http.post("/v1/feedback", json=body, headers=bearer())).status for _ in range(8)
        ]
        assert set(statuses) == {200, 503}
        await ask(site, http)
    assert len(await site.events(InferenceRecorded)) == 2


@pytest.mark.parametrize("is_trusted", [False, True])
async def test_a_trusted_key_judges_requests_of_others(
    bus, tmp_path, tokenizer, monkeypatch, is_trusted
):
    """There is one list of trust: what the gateway lets in, the join counts."""
    ci = KeySpec(key_id="ci", key_hash=hash_key("psk-ci"), is_trusted=is_trusted)
    monkeypatch.setattr("tests.e2e.gateway.conftest.KEYS", (*KEYS, ci))
    site = Site(bus, tmp_path, tokenizer)
    joiner = FeedbackJoiner(JoinConfig(reward_wait_s=0.0))
    async with site.running(joiner), aiohttp.ClientSession(site.url) as http:
        body = {"request_id": await ask(site, http), "name": "tests_passed", "value": 1}
        reply = await http.post("/v1/feedback", json=body, headers=bearer("psk-ci"))
        assert reply.status == (200 if is_trusted else 403)
        if is_trusted:
            joined: list[LiveSampleJoined] = []
            async for delivery in bus.follow([LiveSampleJoined]):
                joined.append(delivery.event)
                break
            assert joined[0].reward == 1.0
