"""Who is who: tenants, users and ids, over plain HTTP."""

import re

import aiohttp
import pytest

from penstock.messages.feedback import FeedbackReceived, InferenceRecorded, LiveSampleJoined

from .conftest import Site, eventually, stored_id

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "Fix add."}]}


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.fixture
async def http(site):
    async with aiohttp.ClientSession(site.url) as session:
        yield session


async def ask(site: Site, http, secret: str = "psk-test", **fields) -> str:
    site.will_reply(site.chat.render_turn("ok"))
    reply = await http.post("/v1/chat/completions", json=CHAT | fields, headers=bearer(secret))
    return (await reply.json())["id"]


async def rate(http, secret: str, **body) -> tuple[int, dict]:
    body = {"name": "accept", "value": 1} | body
    reply = await http.post("/v1/feedback", json=body, headers=bearer(secret))
    return reply.status, await reply.json()


async def test_ids_of_requests_cannot_be_guessed(site, http):
    first, second = [await ask(site, http) for _ in range(2)]
    for request_id in (first, second):
        assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", request_id)
    assert first[:-3] != second[:-3]


async def test_a_stranger_s_feedback_on_a_request_to_come_changes_nothing(site, http, monkeypatch):
    """D1: even with the id known beforehand."""
    known = "chatcmpl-known-beforehand"
    assert (await rate(http, "psk-private", request_id=known, feedback_id="s", value=0))[0] == 200
    deleted = await http.delete("/v1/feedback/s", headers=bearer("psk-private"))
    assert deleted.status == 200
    assert (await rate(http, "psk-private", request_id=known, feedback_id="s2", value=0))[0] == 200
    monkeypatch.setattr("penstock.gateway.app.random_id", lambda prefix: known)
    assert await ask(site, http) == known
    assert (await rate(http, "psk-test", request_id=known, feedback_id="own"))[0] == 200
    (sample,) = await eventually(site, LiveSampleJoined)
    assert (sample.sample_id, sample.feedback_ids, sample.reward) == (
        known,
        [f"user.{stored_id('own')}"],
        1.0,
    )


async def test_a_tenant_cannot_take_another_s_ids_of_feedback(site, http):
    """D2: the victim's feedback is not swallowed as a duplicate."""
    request_id = await ask(site, http)
    squatted = f"fb-{request_id}"
    status, _ = await rate(http, "psk-private", request_id="other", feedback_id=squatted, value=0)
    assert status == 200
    status, body = await rate(http, "psk-test", request_id=request_id, feedback_id=squatted)
    assert (status, body["duplicate"]) == (200, False)
    (sample,) = await eventually(site, LiveSampleJoined)
    assert (sample.reward, sample.tenant) == (1.0, "user")


async def test_keys_of_one_tenant_judge_each_other_s_requests_and_strangers_do_not(site, http):
    request_id = await ask(site, http)
    status, body = await rate(http, "psk-private", request_id=request_id)
    assert (status, body["error"]["code"]) == (403, "not_your_request")
    assert (await rate(http, "psk-mate", request_id=request_id, feedback_id="f"))[0] == 200
    amended = await http.patch("/v1/feedback/f", json={"value": 0}, headers=bearer("psk-test"))
    assert amended.status == 200
    deleted = await http.delete("/v1/feedback/f", headers=bearer("psk-private"))
    assert deleted.status == 404


@pytest.mark.parametrize(
    "fields",
    [{"user": "alice"}, {"safety_identifier": "alice"}, {"metadata": {"user_id": "alice"}}],
)
async def test_an_end_user_is_a_pseudonym_that_differs_by_tenant(site, http, fields):
    request_id = await ask(site, http, **fields)
    await ask(site, http, **fields)
    await ask(site, http, "psk-other", **fields)
    await ask(site, http)
    records = await site.events(InferenceRecorded)
    users = [record.user for record in records]
    assert users[0] == users[1] != users[2]
    assert all(re.fullmatch(r"u-[0-9a-f]{32}", user) for user in users[:3])
    assert users[3] == "k-user"
    await rate(http, "psk-test", request_id=request_id, feedback_id="a")
    await rate(http, "psk-test", request_id=request_id, feedback_id="b", user="bob")
    given = {event.feedback_id: event.user for event in await site.events(FeedbackReceived)}
    assert given[stored_id("a")] == users[0] != given[stored_id("b")]


async def test_names_of_users_and_sessions_are_bounded_and_not_kept(site, http):
    reply = await http.post(
        "/v1/chat/completions", json=CHAT | {"user": "x" * 600}, headers=bearer("psk-test")
    )
    assert (reply.status, (await reply.json())["error"]["param"]) == (400, "user")
    headers = bearer("psk-test") | {"X-Session-Id": "alice@example.org"}
    site.will_reply(site.chat.render_turn("ok"))
    await http.post("/v1/chat/completions", json=CHAT, headers=headers)
    (record,) = await site.events(InferenceRecorded)
    assert re.fullmatch(r"s-[0-9a-f]{32}", record.session_id)
    assert (await rate(http, "psk-test", session_id="alice@example.org"))[0] == 200
