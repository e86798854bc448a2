"""The `openai` client drives the gateway unchanged, on a real bus."""

import asyncio

import numpy as np
import openai
import pytest

from penstock.messages.feedback import InferenceRecorded, LiveSampleJoined
from penstock.messages.rollout import StopReason, ToolCall

from .conftest import eventually, stored_id, until

USER = [{"role": "user", "content": "Fix add."}]
READ_FILE = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
        },
    },
}


@pytest.fixture
async def client(site):
    async with openai.AsyncOpenAI(
        base_url=f"{site.url}/v1", api_key="psk-test", max_retries=0
    ) as client:
        yield client


both_buses = pytest.mark.parametrize("bus", ["memory", "nats"], indirect=True)


def ints(array) -> list[int]:
    return np.frombuffer(array.data, "<i4").tolist()


async def test_a_reply_holds_text_usage_and_is_recorded_token_by_token(site, client):
    ids = site.chat.render_turn("return a + b, café")
    site.will_reply(ids)
    reply = await client.chat.completions.create(
        model="policy", messages=USER, logprobs=True, extra_body={"return_token_ids": True}
    )
    assert reply.choices[0].message.content == "return a + b, café"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].token_ids == ids
    assert [p.logprob for p in reply.choices[0].logprobs.content] == [-0.25] * len(ids)
    assert reply.usage.completion_tokens == len(ids)
    assert reply._request_id == reply.id

    (record,) = await site.events(InferenceRecorded)
    assert record.request_id == reply.id
    assert ints((await site.turn(record)).token_ids) == ids
    assert ints((await site.turn(record)).context_ids) == reply.prompt_token_ids
    assert record.policy_version == 7
    assert record.training_consent
    assert (await site.turn(record)).stop_reason is StopReason.STOP
    assert (await site.turn(record)).route_segments == [b"sealed"]


@both_buses
async def test_a_stream_gives_the_same_text_and_calls_piece_by_piece(site, client):
    calls = [
        ToolCall(name="read_file", arguments={"path": "a.py", "line": "3"}),
        ToolCall(name="read_file", arguments={"path": "b.py"}),
    ]
    ids = site.chat.render_turn("Look: café", calls)
    site.will_reply(ids)
    stream = await client.chat.completions.create(
        model="policy",
        messages=USER,
        tools=[READ_FILE],
        stream=True,
        logprobs=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    text, found, seen_ids, num_logprobs, finish, usage = "", {}, [], 0, None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                found[call.index] = (call.function.name, call.function.arguments)
            seen_ids += getattr(choice, "token_ids", None) or []
            num_logprobs += len(choice.logprobs.content) if choice.logprobs else 0
            finish = choice.finish_reason or finish
    assert text == "Look: café"
    assert found == {
        0: ("read_file", '{"path":"a.py","line":3}'),
        1: ("read_file", '{"path":"b.py"}'),
    }
    assert finish == "tool_calls"
    assert seen_ids == ids
    assert num_logprobs == len(ids)
    assert usage.completion_tokens == len(ids)
    (record,) = await site.events(InferenceRecorded)
    assert [call.name for call in (await site.turn(record)).calls] == ["read_file", "read_file"]


async def test_a_session_keeps_its_sampled_tokens_as_context(site, client):
    first = [site.tokenizer.encode("x")[0]] * 3 + [site.chat.end_id]
    assert site.chat.render_turn("xxx") != first or len(first) == 4
    site.will_reply(first)
    headers = {"X-Session-Id": "s1"}
    reply = await client.chat.completions.create(
        model="policy", messages=USER, extra_headers=headers
    )
    site.will_reply(site.chat.render_turn("done"))
    history = [*USER, reply.choices[0].message.model_dump(exclude_none=True), *USER]
    await client.chat.completions.create(model="policy", messages=history, extra_headers=headers)
    asked = site.generator.asked
    session, again = (request.session_id for request in asked)
    assert session == again != "s1"
    before = [*ints(asked[0].token_ids), *first]
    assert ints(asked[1].token_ids)[: len(before)] == before


async def test_a_generator_that_dies_mid_reply_is_resumed_after_its_last_token(site, client):
    ids = site.chat.render_turn("return a + b")
    site.will_reply(ids, num_chunk=2, fail_after=1, policy_version=7)
    site.will_reply(ids[2:], policy_version=8)
    stream = await client.chat.completions.create(model="policy", messages=USER, stream=True)
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
    assert text == "return a + b"
    first, second = site.generator.asked
    assert ints(second.token_ids) == [*ints(first.token_ids), *ids[:2]]
    assert second.sampling.num_tokens_max == first.sampling.num_tokens_max - 2
    (record,) = await site.events(InferenceRecorded)
    assert ints((await site.turn(record)).token_ids) == ids
    spans = [
        (span.policy_version, span.num_tokens) for span in (await site.turn(record)).version_spans
    ]
    assert spans == [(7, 2), (8, len(ids) - 2)]


async def test_no_generator_is_a_clean_error_before_and_during_a_stream(site, client):
    for _ in range(3):
        site.will_reply([1, 2], fail_after=0)
    with pytest.raises(openai.InternalServerError) as failure:
        await client.chat.completions.create(model="policy", messages=USER, stream=True)
    assert failure.value.status_code == 503
    assert failure.value.response.headers["Retry-After"] == "2"

    ids = site.chat.render_turn("return a + b")
    site.will_reply(ids, num_chunk=2, fail_after=1)
    for _ in range(2):
        site.will_reply(ids, fail_after=0)
    stream = await client.chat.completions.create(model="policy", messages=USER, stream=True)
    with pytest.raises(openai.APIError, match="no generator answered"):
        async for _ in stream:
            pass
    (record,) = await eventually(site, InferenceRecorded)
    assert (await site.turn(record)).stop_reason is StopReason.ABORTED
    await until(lambda: site.generator.aborted == [f"{record.request_id}.3"])


async def test_parallel_calls_can_be_turned_off(site, client):
    call = ToolCall(name="read_file", arguments={"path": "a.py"})
    ids = site.chat.render_turn("", [call])[:-1]
    site.will_reply(ids)
    reply = await client.chat.completions.create(
        model="policy", messages=USER, tools=[READ_FILE], parallel_tool_calls=False
    )
    assert len(reply.choices[0].message.tool_calls) == 1
    assert reply.choices[0].finish_reason == "tool_calls"
    assert ids[-1] in site.generator.asked[0].sampling.stop_token_ids


@both_buses
async def test_feedback_turns_a_request_into_a_live_sample(site, client):
    site.will_reply(site.chat.render_turn("return a + b"))
    reply = await client.chat.completions.create(model="policy", messages=USER)
    body = {"feedback_id": "f1", "request_id": reply.id, "name": "accept", "value": 1}
    answer = await client.post("/feedback", body=body, cast_to=object)
    assert answer == {"feedback_id": "f1", "request_id": reply.id, "duplicate": False}
    again = await client.post("/feedback", body=body, cast_to=object)
    assert again["duplicate"]
    async with asyncio.timeout(20):
        while not (joined := await site.events(LiveSampleJoined)):
            await asyncio.sleep(0.05)
    (sample,) = joined
    assert (sample.sample_id, sample.reward, sample.feedback_ids) == (
        reply.id,
        1.0,
        [f"user.{stored_id('f1')}"],
    )
    assert (sample.policy_version, sample.propensity) == (7, 1.0)


async def test_models_lists_the_one_model(client):
    assert [model.id async for model in client.models.list()] == ["policy"]
