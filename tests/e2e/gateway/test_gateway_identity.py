"""Who is who: tenants, users and ids, over plain HTTP."""

import asyncio
import json
import re

import aiohttp
import pytest

from penstock.gateway.identity import ClientUser, client_user
from penstock.messages.feedback import FeedbackReceived, InferenceRecorded, LiveSampleJoined

from .conftest import Site, eventually, stored_id, until

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
    monkeypatch.setattr("penstock.gateway.answering.random_id", lambda prefix: known)
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


DEVICE = {"device_id": "d" * 64, "account_uuid": "", "session_id": ""}


@pytest.mark.parametrize(
    ("ids", "feedback_session"),
    [
        ([json.dumps(DEVICE | {"session_id": name}) for name in ("s1", "s2")], "s1"),
        (
            [
                json.dumps(DEVICE | {"account_uuid": "a", "device_id": d, "session_id": d})
                for d in "xy"
            ],
            "x",
        ),
        ([f"user_5f0c_account__session_{name}" for name in ("s1", "s2")], "s1"),
        ([f"user_5f0c_account_9a-b_session_{name}" for name in ("s1", "s2")], "s1"),
    ],
)
async def test_a_user_id_with_a_session_inside_is_one_user_and_the_client_s_session(
    site, http, ids, feedback_session
):
    for user_id in ids:
        site.will_reply(site.chat.render_turn("ok"))
        body = {"model": "policy", "max_tokens": 8, "metadata": {"user_id": user_id}}
        ask = body | {"messages": [{"role": "user", "content": "one"}]}
        reply = await http.post("/v1/messages", json=ask, headers=bearer("psk-test"))
        assert reply.status == 200
    first, second = await eventually_two(site)
    assert first.user == second.user
    assert first.session_id != second.session_id
    status, body = await rate(http, "psk-test", session_id=feedback_session, feedback_id="f")
    assert (status, body["request_id"]) == (200, first.request_id)


async def eventually_two(site):
    await until(lambda: len(site.generator.asked) == 2)
    async with asyncio.timeout(20):
        while len(found := await site.events(InferenceRecorded)) < 2:
            await asyncio.sleep(0.02)
    return found


@pytest.mark.parametrize(
    "text", ['{"session_id": "s"}', "{broken", '{"device_id": 5}', "[]", "ann"]
)
async def test_a_user_id_without_a_user_inside_is_taken_whole(text):
    assert client_user(text) == ClientUser(text)


@pytest.mark.parametrize(
    "header",
    ["X-Claude-Code-Session-Id", "session_id", "Session-Id", "conversation_id", "X-Session-Id"],
)
async def test_a_session_header_of_a_client_names_the_session(site, http, header):
    site.will_reply(site.chat.render_turn("ok"))
    headers = bearer("psk-test") | {header: "conv-7"}
    reply = await http.post("/v1/chat/completions", json=CHAT, headers=headers)
    request_id = (await reply.json())["id"]
    status, body = await rate(http, "psk-test", session_id="conv-7", feedback_id="f")
    assert (status, body["request_id"]) == (200, request_id)
