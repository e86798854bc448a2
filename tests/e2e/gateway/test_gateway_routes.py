"""Responses, Messages, completions and generate: each in its own words, all one conversation."""

import json

import aiohttp
import numpy as np
import openai
import pytest

from penstock.messages.feedback import InferenceRecorded
from penstock.messages.rollout import ToolCall

PARAMETERS = {"type": "object", "properties": {"line": {"type": "integer"}}}
CALL = ToolCall(name="look", arguments={"line": " 3"})
"""Its argument comes back as `3`: only the memory knows how it was sampled."""


@pytest.fixture
async def http(site):
    headers = {"x-api-key": "psk-test"}
    async with aiohttp.ClientSession(site.url, headers=headers) as session:
        yield session


@pytest.fixture
async def client(site):
    async with openai.AsyncOpenAI(
        base_url=f"{site.url}/v1", api_key="psk-test", max_retries=0
    ) as client:
        yield client


def ints(array) -> list[int]:
    return np.frombuffer(array.data, "<i4").tolist()


async def events(reply) -> list[tuple[str, dict]]:
    found = []
    for part in (await reply.text()).split("\n\n"):
        if part and part != "data: [DONE]":
            name, data = part.split("\n") if part.startswith("event: ") else ("", part)
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


FUNCTION = {"type": "function", "name": "look", "parameters": PARAMETERS}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_holds_text_and_calls_and_its_session_goes_on(site, client, stream):
    first = site.chat.render_turn("Look: café", [CALL])
    asked = {"model": "policy", "instructions": "Be brief.", "tools": [FUNCTION]}
    asked["extra_headers"] = {"X-Session-Id": "s1"}
    site.will_reply(first)
    if stream:
        kinds, text, response = [], "", None
        async for event in await client.responses.create(input="Fix add.", stream=True, **asked):
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
            response = event.response if event.type == "response.completed" else None
        assert text == "Look: café"
        assert kinds[:3] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
        ]
        assert "response.function_call_arguments.done" in kinds
    else:
        response = await client.responses.create(input="Fix add.", **asked)
        assert response.output_text == "Look: café"
    message, call = response.output
    assert (call.type, call.name, call.arguments) == ("function_call", "look", '{"line":3}')
    assert response.usage.output_tokens == len(first)
    assert response.status == "completed"
    (record,) = await site.events(InferenceRecorded)
    turn = await site.turn(record)
    assert (record.request_id, ints(turn.token_ids)) == (response.id, first)

    site.will_reply(site.chat.render_turn("done"))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "x = 1"}
    begun = {"role": "user", "content": [{"type": "input_text", "text": "Fix add."}]}
    history = [begun, message.model_dump(), {"type": "reasoning", "summary": []}]
    history += [call.model_dump(), output]
    again = await client.responses.create(input=history, **asked)
    assert again.output_text == "done"
    before = [*ints(site.generator.asked[0].token_ids), *first]
    assert ints(site.generator.asked[1].token_ids)[: len(before)] == before


async def test_custom_tools_take_a_text_and_those_of_a_service_are_left_out(site, client):
    call = ToolCall(name="patch", arguments={"input": "*** Begin"})
    site.will_reply(site.chat.render_turn("", [call]))
    tools = [{"type": "custom", "name": "patch"}, {"type": "web_search"}]
    raw = await client.responses.with_raw_response.create(model="policy", input="x", tools=tools)
    assert raw.headers["x-penstock-ignored"] == "tools[1]"
    (item,) = raw.parse().output
    assert (item.type, item.input) == ("custom_tool_call", "*** Begin")
    with pytest.raises(openai.BadRequestError, match="whole input"):
        await client.responses.create(model="policy", input="x", conversation="c")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_continued_by_its_id(site, client, stream):
    first = site.chat.render_turn("Look: café", [CALL])
    site.will_reply(first)
    asked = {"model": "policy", "tools": [FUNCTION]}
    begun = await client.responses.create(input="Fix add.", instructions="Be brief.", **asked)
    call = begun.output[-1]
    site.will_reply(site.chat.render_turn("done"))
    output = [{"type": "function_call_output", "call_id": call.call_id, "output": "x = 1"}]
    again = client.responses.create(
        input=output, previous_response_id=begun.id, stream=stream, **asked
    )
    if stream:
        again = [event async for event in await again][-1].response
    else:
        again = await again
    assert (again.output_text, again.previous_response_id) == ("done", begun.id)
    # The context has the first turn exactly as it was sampled, without its instructions.
    whole = [{"role": "user", "content": "Fix add."}, *(one.model_dump() for one in begun.output)]
    site.will_reply(site.chat.render_turn("done"))
    await client.responses.create(input=[*whole, *output], **asked)
    contexts = [ints(one.token_ids) for one in site.generator.asked]
    assert contexts[1] == contexts[2]
    site.will_reply(site.chat.render_turn("bye"))
    last = await client.responses.create(input="More.", previous_response_id=again.id, **asked)
    assert last.output_text == "bye"
    site.will_reply(site.chat.render_turn("!"))
    silent = [{"type": "reasoning", "summary": []}]
    more = await client.responses.create(input=silent, previous_response_id=last.id, **asked)
    assert more.output_text == "!"
    assert ints(site.generator.asked[3].token_ids)[: len(contexts[1])] == contexts[1]


async def test_a_response_is_not_continued_unless_it_is_kept(site, client):
    asked = {"model": "policy", "input": "x"}
    site.will_reply(site.chat.render_turn("a"))
    unkept = await client.responses.create(store=False, **asked)
    site.will_reply(site.chat.render_turn("b"))
    of_other = await client.responses.create(user="someone", **asked)
    site.will_reply(site.chat.render_turn("c"))
    # Without consent to storage no text stays, not in memory either.
    silent = client.with_options(api_key="psk-private")
    unstored = await silent.responses.create(**asked)
    with pytest.raises(openai.NotFoundError):
        await silent.responses.create(previous_response_id=unstored.id, **asked)
    for name in (unkept.id, of_other.id, "resp_unknown"):
        with pytest.raises(openai.NotFoundError) as found:
            await client.responses.create(previous_response_id=name, **asked)
        assert found.value.code == "previous_response_not_found"


async def test_a_response_that_breaks_off_says_so(site, client):
    ids = site.chat.render_turn("return a + b")
    site.will_reply(ids, num_chunk=2, fail_after=1)
    for _ in range(2):
        site.will_reply(ids, fail_after=0)
    stream = await client.responses.create(model="policy", input="x", stream=True)
    last = [event async for event in stream][-1]
    assert (last.type, last.response.error.code) == ("response.failed", "no_generator")
    site.will_reply(ids)
    cut = await client.responses.create(model="policy", input="x", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


TOOL = {"name": "look", "input_schema": PARAMETERS}
MESSAGES = {"model": "policy", "max_tokens": 64, "messages": [{"role": "user", "content": "Fix."}]}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_holds_blocks_and_its_session_goes_on(site, http, stream):
    first = site.chat.render_turn("Look: café", [CALL])
    site.will_reply(first)
    session = {"X-Session-Id": "s1"}
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    body = MESSAGES | {"tools": [TOOL], "system": system, "metadata": {"user_id": "u1"}}
    reply = await http.post("/v1/messages", json=body | {"stream": stream}, headers=session)
    assert reply.status == 200, await reply.text()
    if stream:
        found = await events(reply)
        assert [name for name, _ in found] == [data["type"] for _, data in found]
        deltas = [data["delta"] for name, data in found if name == "content_block_delta"]
        assert "".join(delta.get("text", "") for delta in deltas) == "Look: café"
        assert deltas[-1] == {"type": "input_json_delta", "partial_json": '{"line":3}'}
        starts = [data["content_block"] for name, data in found if name == "content_block_start"]
        assert [start["type"] for start in starts] == ["text", "tool_use"]
        assert found[-2][1]["delta"]["stop_reason"] == "tool_use"
        assert found[-2][1]["usage"]["output_tokens"] == len(first)
        call = starts[1] | {"input": {"line": 3}}
    else:
        message = await reply.json()
        text, call = message["content"]
        assert (text["text"], call["input"]) == ("Look: café", {"line": 3})
        assert message["stop_reason"] == "tool_use"
        assert message["usage"]["output_tokens"] == len(first)
        assert message["id"] == (await site.events(InferenceRecorded))[0].request_id
    site.will_reply(site.chat.render_turn("done"))
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [TEXT], "is_error": True}
    body["messages"] = [
        *MESSAGES["messages"],
        {"role": "assistant", "content": [THOUGHT, {"type": "text", "text": "Look: café"}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
    ]
    counted = await http.post("/v1/messages/count_tokens", json=body, headers=session)
    await http.post("/v1/messages", json=body, headers=session)
    asked = [ints(one.token_ids) for one in site.generator.asked]
    assert asked[1][: len(asked[0]) + len(first)] == [*asked[0], *first]
    assert await counted.json() == {"input_tokens": len(asked[1])}


TEXT = {"type": "text", "text": "x = 1"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": ""}


async def test_errors_of_messages_are_in_anthropic_s_form(site, http):
    def turns(*contents):
        return {"messages": [{"role": "user", "content": content} for content in contents]}

    wrong = [
        (MESSAGES | {"max_tokens": None}, "max_tokens: "),
        (MESSAGES | turns([{"type": "image"}]), "messages[0].content[0].type: "),
        (MESSAGES | turns([TEXT, {"type": "tool_result"}]), "messages[0].content[1]: "),
        (MESSAGES | {"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: "),
        (MESSAGES | {"temperature": 3}, "temperature: "),
        (MESSAGES | turns("x " * 5000), "prompt is too long: "),
    ]
    for body, start in wrong:
        reply = await http.post("/v1/messages", json=body)
        answer = await reply.json()
        assert (reply.status, answer["type"]) == (400, "error")
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["message"].startswith(start), (body, answer)
    for body, status, kind in (
        (MESSAGES | {"model": "claude"}, 404, "not_found_error"),
        (MESSAGES, 401, "authentication_error"),
    ):
        key = {"x-api-key": "no"} if status == 401 else {}
        reply = await http.post("/v1/messages", json=body, headers=key)
        assert (reply.status, (await reply.json())["error"]["type"]) == (status, kind)
    ids = site.chat.render_turn("return a + b")
    site.will_reply(ids, num_chunk=2, fail_after=1)
    for _ in range(2):
        site.will_reply(ids, fail_after=0)
    found = await events(await http.post("/v1/messages", json=MESSAGES | {"stream": True}))
    assert (found[-1][0], found[-1][1]["error"]["type"]) == ("error", "overloaded_error")


async def test_a_stop_sequence_of_a_message_is_named(site, http):
    site.will_reply(site.chat.render_turn("one two three"))
    reply = await http.post("/v1/messages", json=MESSAGES | {"stop_sequences": [" two"]})
    message = await reply.json()
    assert message["content"] == [{"type": "text", "text": "one"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", " two")


async def test_completions_continue_a_text_or_ids(site, client):
    ids = site.chat.render_turn("a + b")
    prompt = site.tokenizer.encode("return ")
    for given in ("return ", ["return "], prompt, [prompt]):
        site.will_reply(ids)
        reply = await client.completions.create(model="policy", prompt=given, logprobs=0)
        (choice,) = reply.choices
        assert (choice.text, choice.finish_reason) == ("a + b", "stop")
        assert choice.logprobs.token_logprobs == [-0.25] * len(ids)
        assert ints(site.generator.asked[-1].token_ids) == prompt
    site.will_reply(ids)
    stream = await client.completions.create(model="policy", prompt="return ", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "a + b"
    for body in ({"prompt": ["a", "b"]}, {"prompt": []}, {"prompt": [10**6]}, {"echo": True}):
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(**{"model": "policy", "prompt": "x"} | body)


@pytest.mark.parametrize("stream", [False, True])
async def test_generate_takes_and_gives_token_ids(site, http, stream):
    ids = site.chat.render_turn("a + b")
    site.will_reply(ids)
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 99, "logprobs": 0}}
    reply = await http.post("/inference/v1/generate", json=body | {"stream": stream})
    if stream:
        parts = [data["choices"][0] for _, data in await events(reply)]
    else:
        parts = (await reply.json())["choices"]
    assert [one for part in parts for one in part["token_ids"]] == ids
    entries = [entry for part in parts for entry in part["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == [f"token_id:{one}" for one in ids]
    assert parts[-1]["finish_reason"] == "stop"
    assert ints(site.generator.asked[0].token_ids) == [5, 6, 7]
    for wrong, param in (
        ({"token_ids": [-1]}, "token_ids[0]"),
        ({"token_ids": [1], "sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
    ):
        reply = await http.post("/inference/v1/generate", json=wrong)
        assert (reply.status, (await reply.json())["error"]["param"]) == (400, param)


async def test_a_session_that_changes_its_route_keeps_its_sampled_tokens(site, http, client):
    first = [site.tokenizer.encode("x")[0]] * 3 + [site.chat.end_id]
    site.will_reply(first)
    session = {"X-Session-Id": "s1"}
    user = {"role": "user", "content": "Fix."}
    await client.chat.completions.create(model="policy", messages=[user], extra_headers=session)
    history = [user, {"role": "assistant", "content": "xxx"}, user]
    for path, name in (("/v1/messages", "messages"), ("/v1/responses", "input")):
        site.will_reply(site.chat.render_turn("done"))
        asked = {"model": "policy", "max_tokens": 9, name: history}
        reply = await http.post(path, json=asked, headers=session)
        assert reply.status == 200, await reply.text()
        before = [*ints(site.generator.asked[0].token_ids), *first]
        assert ints(site.generator.asked[-1].token_ids)[: len(before)] == before


async def test_one_model_can_be_looked_up(client):
    assert (await client.models.retrieve("policy")).id == "policy"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt/4")


NAMESPACE = {"type": "namespace", "name": "mcp__words", "tools": [FUNCTION | {"name": "lookup"}]}


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_of_a_namespace_are_offered_and_called_by_namespace_and_name(
    site, client, stream
):
    made = ToolCall(name="mcp__words__lookup", arguments={"line": "3"})
    asked = {"model": "policy", "tools": [FUNCTION, NAMESPACE]}
    site.will_reply(site.chat.render_turn("", [made]))
    if stream:
        events = [
            event async for event in await client.responses.create(input="x", stream=True, **asked)
        ]
        (call,) = events[-1].response.output
    else:
        (call,) = (await client.responses.create(input="x", **asked)).output
    assert (call.name, call.namespace) == ("lookup", "mcp__words")
    assert json.loads(call.arguments) == {"line": 3}
    site.will_reply(site.chat.render_turn("done"))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "a word"}
    history = [{"role": "user", "content": "x"}, call.model_dump(), output]
    await client.responses.create(input=history, **asked)
    prompt = site.chat.tokenizer.decode(ints(site.generator.asked[1].token_ids))
    assert "mcp__words__lookup" in prompt


@pytest.mark.parametrize(
    "choice", [{"name": "lookup"}, {"name": "lookup", "namespace": "mcp__words"}]
)
async def test_a_tool_of_a_namespace_can_be_required(site, http, choice):
    site.will_reply(site.chat.render_turn("", [ToolCall(name="mcp__words__lookup", arguments={})]))
    body = {"model": "policy", "input": "x", "tools": [NAMESPACE]}
    reply = await http.post(
        "/v1/responses", json=body | {"tool_choice": {"type": "function"} | choice}
    )
    assert (reply.status, (await reply.json())["output"][0]["name"]) == (200, "lookup")


async def test_a_namespace_needs_a_name_and_distinct_tools(site, http):
    for broken, place in (
        (NAMESPACE | {"name": ""}, "tools[0].name"),
        (NAMESPACE | {"tools": [FUNCTION, FUNCTION]}, "tools[1]"),
        (NAMESPACE | {"tools": [{"type": "function"}]}, "tools[0].tools[0].name"),
    ):
        body = {"model": "policy", "input": "x", "tools": [broken]}
        reply = await http.post("/v1/responses", json=body)
        assert (reply.status, (await reply.json())["error"]["param"]) == (400, place)


CUT = '{"path": "a.py", "content": "import os\n'


@pytest.mark.parametrize("arguments", [CUT, '["a.py"]', "7", "", None, {"path": "a.py"}, ["a.py"]])
async def test_a_call_in_the_history_that_cannot_be_read_is_shown(site, http, arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": arguments}}
    chat = [
        {"role": "user", "content": "Write"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "error: no JSON"},
    ]
    items = [
        {"role": "user", "content": "Write"},
        {"type": "function_call", "call_id": "c1", "name": "w", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c1", "output": "error: no JSON"},
    ]
    blocks = [
        {"role": "user", "content": "Write"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "w", "input": arguments}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "error: no JSON"}],
        },
    ]
    for path, body in (
        ("/v1/chat/completions", {"messages": chat}),
        ("/v1/responses", {"input": items}),
        ("/v1/messages", {"messages": blocks, "max_tokens": 8}),
    ):
        site.will_reply(site.chat.render_turn("ok"))
        reply = await http.post(path, json=body | {"model": "policy"})
        assert reply.status == 200, await reply.text()
        prompt = site.chat.tokenizer.decode(ints(site.generator.asked[-1].token_ids))
        assert "error: no JSON" in prompt
        if isinstance(arguments, str):
            assert arguments in prompt


async def test_an_offered_tool_with_an_unusual_name_is_called(site, http):
    name = "mcp__plugin_browser-devtools-helper_browser-devtools__get_console_message"
    parameters = {"type": "object", "properties": {"-n": {"type": "boolean"}, "größe": {}}}
    made = ToolCall(name=name, arguments={"-n": "true", "größe": "5"})
    site.will_reply(site.chat.render_turn("", [made]))
    tools = [{"name": name, "input_schema": parameters}]
    body = {"model": "policy", "max_tokens": 512, "tools": tools}
    ask = [{"role": "user", "content": "Go"}]
    reply = await (await http.post("/v1/messages", json=body | {"messages": ask})).json()
    (block,) = reply["content"]
    assert (block["name"], block["input"]) == (name, {"-n": True, "größe": 5})
