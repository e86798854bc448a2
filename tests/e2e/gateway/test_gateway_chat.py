"""The whole chat route: what clients send, and what they get back."""

import json

import aiohttp
import numpy as np
import pytest

from penstock.messages.feedback import InferenceRecorded
from penstock.messages.rollout import StopReason, ToolCall

from .conftest import Site

USER = {"role": "user", "content": "Fix add."}
GOOD = {"model": "policy", "messages": [USER]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {}}}}


@pytest.fixture
async def http(site):
    headers = {"Authorization": "Bearer psk-test"}
    async with aiohttp.ClientSession(site.url, headers=headers) as session:
        yield session


async def ask(http, **fields) -> dict:
    reply = await http.post("/v1/chat/completions", json=GOOD | fields)
    assert reply.status == 200, await reply.text()
    return await reply.json()


async def events(http, **fields) -> list[dict]:
    reply = await http.post("/v1/chat/completions", json=GOOD | fields | {"stream": True})
    assert reply.status == 200, await reply.text()
    assert reply.headers["x-request-id"]
    lines = (await reply.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def ints(array) -> list[int]:
    return np.frombuffer(array.data, "<i4").tolist()


NULLS = [
    *("temperature", "top_p", "n", "stop", "logprobs", "top_logprobs", "tools", "tool_choice"),
    *("parallel_tool_calls", "user", "response_format", "logit_bias", "seed", "max_tokens"),
    *("max_completion_tokens", "stream", "stream_options", "store", "metadata", "modalities"),
    *("presence_penalty", "frequency_penalty", "service_tier", "reasoning_effort"),
]


async def test_nulls_count_as_absent_and_what_has_no_effect_is_listed(site, http):
    site.will_reply(site.chat.render_turn("ok"))
    await ask(http, **dict.fromkeys(NULLS))
    site.will_reply(site.chat.render_turn("ok"))
    without = {"verbosity": "low", "prompt_cache_key": "k", "chat_template_kwargs": {}, "wat": [1]}
    harmless = {"response_format": {"type": "text"}, "tool_choice": "auto", "modalities": ["text"]}
    reply = await http.post("/v1/chat/completions", json=GOOD | without | harmless | {"\r\nx": 1})
    assert reply.status == 200
    expected = "chat_template_kwargs, prompt_cache_key, verbosity, wat, ..."
    assert reply.headers["x-penstock-ignored"] == expected


@pytest.mark.parametrize("num_chunk", [1, 2, 50])
async def test_a_stop_text_ends_the_reply_wherever_tokens_are_cut(site, http, num_chunk):
    ids = site.chat.render_turn("return a\nEND of it")
    for stops, expected in ((["of", "\nEN"], "return a"), (["return"], ""), ("\nEx", None)):
        site.will_reply(ids, num_chunk=num_chunk)
        reply = await ask(http, stop=stops)
        (choice,) = reply["choices"]
        whole = "return a\nEND of it" if expected is None else expected
        assert (choice["message"]["content"] or "") == whole
        assert choice["finish_reason"] == "stop"
        assert ("stop_reason" in choice) == (expected is not None)
        site.will_reply(ids, num_chunk=num_chunk)
        deltas = [
            e["choices"][0]["delta"].get("content", "") for e in await events(http, stop=stops)
        ]
        assert "".join(deltas) == whole
    record = (await site.events(InferenceRecorded))[0]
    assert ints((await site.turn(record)).token_ids) == ids, "what was sampled is on record whole"
    assert (await site.turn(record)).stop_reason is StopReason.STOP
    assert bool(site.generator.aborted) == (num_chunk < len(ids))


async def test_several_choices_are_sampled_and_recorded_each(site, http):
    texts = {"one", "two", "three"}
    for stream in (False, True):
        for text in sorted(texts):
            site.will_reply(site.chat.render_turn(text), num_chunk=1)
        if stream:
            found: dict[int, str] = {}
            for event in await events(http, n=3, seed=5):
                (choice,) = event["choices"]
                found.setdefault(choice["index"], "")
                found[choice["index"]] += choice["delta"].get("content", "")
            assert set(found.values()) == texts
        else:
            reply = await ask(http, n=3, seed=5)
            assert {choice["message"]["content"] for choice in reply["choices"]} == texts
            ids = [choice["request_id"] for choice in reply["choices"]]
    records = await site.events(InferenceRecorded)
    assert len({record.request_id for record in records}) == 6
    assert {*ids} <= {record.request_id for record in records}
    seeds = [asked.sampling.seed for asked in site.generator.asked[:3]]
    assert sorted(seeds) == [5, 6, 7]


async def test_results_are_matched_to_their_calls(site, http):
    def call(call_id, path):
        function = {"name": "look", "arguments": json.dumps({"path": path})}
        return {"id": call_id, "type": "function", "function": function}

    def result(call_id, content):
        return {"role": "tool", "tool_call_id": call_id, "content": content}

    turn = {"role": "assistant", "content": None, "tool_calls": [call("a", "x"), call("b", "y")]}
    orders = [
        [result("a", "of x"), result("b", "of y")],
        [result("b", "of y"), result("a", "of x")],
    ]
    for results in orders:
        site.will_reply(site.chat.render_turn("ok"))
        await ask(http, messages=[USER, turn, *results], tools=[TOOL])
    first, second = (ints(asked.token_ids) for asked in site.generator.asked)
    assert first == second
    for results, index in (([result("c", "?")], 2), ([result("a", "x"), result("a", "x")], 3)):
        body = GOOD | {"messages": [USER, turn, *results]}
        reply = await http.post("/v1/chat/completions", json=body)
        error = (await reply.json())["error"]
        assert (reply.status, error["param"]) == (400, f"messages[{index}].tool_call_id")


async def test_a_call_with_typed_arguments_comes_back_as_it_was_sampled(site, http):
    parameters = {"properties": {"line": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    first = site.chat.render_turn("", [ToolCall(name="look", arguments={"line": " 3"})])
    assert site.chat.render_turn("", [ToolCall(name="look", arguments={"line": "3"})]) != first
    site.will_reply(first)
    headers = {"X-Session-Id": "s1"}
    body = GOOD | {"tools": [tool]}
    reply = await (await http.post("/v1/chat/completions", json=body, headers=headers)).json()
    message = reply["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"line":3}'
    site.will_reply(site.chat.render_turn("done"))
    answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
    body |= {"messages": [USER, message, answer]}
    await http.post("/v1/chat/completions", json=body, headers=headers)
    before = [*ints(site.generator.asked[0].token_ids), *first]
    assert ints(site.generator.asked[1].token_ids)[: len(before)] == before


async def test_a_prompt_that_is_too_long_is_refused_in_openai_s_words_and_charged(
    bus, tmp_path, tokenizer
):
    site = Site(bus, tmp_path, tokenizer)
    headers = {"Authorization": "Bearer psk-test"}
    async with site.running(), aiohttp.ClientSession(site.url, headers=headers) as http:
        remaining = 600_000
        for num in (20_000, 900_000):
            body = GOOD | {"messages": [{"role": "user", "content": "x " * (num // 2)}]}
            reply = await http.post("/v1/chat/completions", json=body)
            error = (await reply.json())["error"]
            assert (reply.status, error["code"]) == (400, "context_length_exceeded")
            assert "This model's maximum context length is 1024 tokens" in error["message"]
            reply = await http.post("/v1/chat/completions", json=GOOD | {"n": 99})
            left = int(reply.headers["x-ratelimit-remaining-tokens"])
            assert left < remaining - num // 8
            remaining = left


@pytest.mark.parametrize("depth", [100, 5000])
async def test_a_tool_s_schema_that_is_nested_too_deep_is_refused(site, http, depth):
    schema = '{"a":' * depth + "1" + "}" * depth
    tool = '{"type":"function","function":{"name":"f","parameters":' + schema + "}}"
    data = json.dumps(GOOD)[:-1] + ', "tools": [' + tool + "]}"
    reply = await http.post("/v1/chat/completions", data=data)
    assert (reply.status, (await reply.json())["error"]["type"]) == (400, "invalid_request_error")
    assert not site.generator.asked


async def test_a_body_in_no_encoding_is_refused(site, http):
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    reply = await http.post("/v1/chat/completions", data=b"no gzip", headers=headers)
    assert reply.status == 400
    assert (await reply.json())["error"]["code"]
