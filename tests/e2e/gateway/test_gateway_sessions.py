"""Clients that name no session: requests of one conversation are one session in the log."""

import asyncio

import openai
import pytest

from penstock.messages.feedback import FeedbackReceived, InferenceRecorded, LiveSampleJoined

USER = [{"role": "user", "content": "Fix add."}]


@pytest.fixture
async def client(site):
    async with openai.AsyncOpenAI(
        base_url=f"{site.url}/v1", api_key="psk-test", max_retries=0
    ) as client:
        yield client


async def say(site, client, messages, text, **options):
    site.will_reply(site.chat.render_turn(text))
    raw = await client.chat.completions.with_raw_response.create(
        model="policy", messages=messages, **options
    )
    message = raw.parse().choices[0].message.model_dump(exclude_none=True)
    return raw.headers.get("x-session-id"), message


async def test_a_conversation_is_a_session_without_a_header(site, client):
    first, reply = await say(site, client, USER, "one")
    history = [*USER, reply, *USER]
    second, reply = await say(site, client, history, "two")
    other, _ = await say(site, client, USER, "else", user="somebody-else")
    assert first == second != other
    changed = [*history[:1], reply | {"content": " one "}, *USER, {"role": "user", "content": "?"}]
    third, _ = await say(site, client, changed, "three")
    assert third == first
    named, _ = await say(site, client, USER, "four", extra_headers={"X-Session-Id": "mine"})
    assert named is None
    records = await site.events(InferenceRecorded)
    sessions = [record.session_id for record in records]
    assert sessions[0] == sessions[1] == sessions[3]
    assert len(set(sessions)) == 3
    chains = [record.chain for record in records]
    assert chains[:2] == [records[0].request_id] * 2
    assert chains[3] == records[3].request_id
    shown = (
        await client._client.get(
            f"{site.url}/metrics", headers={"Authorization": "Bearer psk-operator"}
        )
    ).text
    assert 'penstock_gateway_prefixes_total{kind="exact"} 1.0' in shown
    assert 'penstock_gateway_prefixes_total{kind="changed"} 1.0' in shown


async def test_feedback_names_the_session_that_the_reply_s_header_named(site, client):
    session, reply = await say(site, client, USER, "one")
    await say(site, client, [*USER, reply, *USER], "two")
    body = {"session_id": session, "name": "tests_passed", "value": 1.0}
    done = await client.post("/feedback", body=body, cast_to=object)
    records = await site.events(InferenceRecorded)
    assert done["request_id"] == records[1].request_id
    assert await site.events(FeedbackReceived)

    samples = []
    async with asyncio.timeout(20.0):
        while not samples:
            await asyncio.sleep(0.02)
            samples = await site.events(LiveSampleJoined)
    assert samples[0].request_ids == [record.request_id for record in records]
    assert samples[0].reward == 1.0
