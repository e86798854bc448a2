"""Programs outside of the run play rollouts: what they sample is recorded as it was sampled."""

import asyncio

import aiohttp
import openai
import pytest

from penstock.infra.api.rollouts import RolloutClient, RolloutServiceError, play
from penstock.kernels.arrays import from_array
from penstock.messages.rollout import EpisodeEnd, ToolCall

from .conftest import KEY, command

USER = {"role": "user", "content": "Add."}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"line": {"type": "integer"}}},
    },
}


def ints(array) -> list[int]:
    return from_array(array).tolist()


@pytest.fixture
async def client(site):
    async with site.serving():
        yield RolloutClient(site.url, KEY)


def model(attempt) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.api_key, max_retries=0)


async def test_turns_are_stored_as_sampled_and_continue_each_other(site, client):
    call = ToolCall(name="look", arguments={"line": " 3"})
    first, second = site.chat.render_turn("Look", [call]), site.chat.render_turn("done")
    site.will_reply(first, second)
    await site.start(command())
    attempt = await client.take(wait_s=10.0)
    task = attempt.taken.task
    assert (task.instruction, task.files, task.binaries) == (
        "Add.",
        {"a.py": "x = 1\n"},
        {"b.bin": "/w=="},
    )
    async with client.playing(attempt), model(attempt) as agent:
        asked = {"model": "policy", "tools": [TOOL]}
        message = (await agent.chat.completions.create(messages=[USER], **asked)).choices[0].message
        assert message.tool_calls[0].function.arguments == '{"line":3}'
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "x = 1"}
        history = [USER, message.model_dump(exclude_none=True), result]
        again = await agent.chat.completions.create(messages=history, **asked)
        assert again.choices[0].message.content == "done"
        await attempt.end(0.5)
    [end] = await site.ends()
    assert (end.end, end.reported_reward, end.num_segments) == (EpisodeEnd.FINISHED, 0.5, 1)
    turns = await site.turns()
    assert [ints(turn.token_ids) for turn in turns] == [first, second]
    context = [*ints(turns[0].context_ids), *first, *ints(turns[1].context_ids)]
    assert ints(site.generator.asked[1].token_ids) == context, "nothing is tokenized again"
    assert [turn.sampling.temperature for turn in turns] == [1.0, 1.0]
    assert turns[0].sampling.seed != turns[1].sampling.seed


async def test_a_request_that_does_not_continue_starts_a_segment(site, client):
    replies = [site.chat.render_turn(text) for text in ("a", "side", "b")]
    site.will_reply(*replies)
    await site.start(command())
    attempt = await client.take(wait_s=10.0)
    async with client.playing(attempt), model(attempt) as agent:
        for content in ("Add.", "A side agent's question", "Add."):
            messages = [{"role": "user", "content": content}]
            await agent.chat.completions.create(model="policy", messages=messages)
        await attempt.end(1.0)
    [end] = await site.ends()
    assert end.num_segments == 3
    turns = await site.turns()
    assert [turn.starts_segment for turn in turns] == [False, True, True]
    for turn, asked in zip(turns, site.generator.asked, strict=True):
        assert ints(turn.context_ids) == ints(asked.token_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_all_model_routes_answer_and_streams_are_whole(site, client, stream):
    site.will_reply(*[site.chat.render_turn("café")] * 2)
    await site.start(command())
    attempt = await client.take(wait_s=10.0)
    async with client.playing(attempt), model(attempt) as agent:
        if stream:
            asked = {"model": "policy", "stream": True}
            chunks = await agent.chat.completions.create(messages=[USER], **asked)
            assert "".join([c.choices[0].delta.content or "" async for c in chunks]) == "café"
            events = await agent.responses.create(input="Add.", **asked)
            assert [event async for event in events][-1].response.output_text == "café"
        else:
            reply = await agent.responses.create(model="policy", input="Add.")
            assert reply.output_text == "café"
            headers = {"x-api-key": attempt.api_key}
            body = {"model": "policy", "max_tokens": 9, "messages": [USER]}
            url = f"{attempt.taken.url}/v1/messages"
            async with (
                aiohttp.ClientSession() as http,
                http.post(url, json=body, headers=headers) as got,
            ):
                assert (await got.json())["content"] == [{"type": "text", "text": "café"}]
        await attempt.end(1.0)


async def test_limits_of_the_task_hold_and_are_the_end(site, client):
    site.will_reply(*[site.chat.render_turn("ok")] * 4)
    await site.start(command(num_turns_max=1), command("g1-m0", num_tokens_max=20))
    ends = {}
    for _ in range(2):
        attempt = await client.take(wait_s=10.0)
        async with client.playing(attempt), model(attempt) as agent:
            with pytest.raises((openai.ConflictError, openai.BadRequestError)) as refused:
                for _ in range(3):
                    await agent.chat.completions.create(model="policy", messages=[USER])
            await attempt.end(0.0)
        ends[attempt.taken.rollout_id] = refused.value.code
    assert ends == {"g0-m0": "turn_limit", "g1-m0": "token_limit"}
    assert {end.end for end in await site.ends(2)} == {
        EpisodeEnd.TURN_LIMIT,
        EpisodeEnd.TOKEN_LIMIT,
    }


async def test_a_retry_of_a_request_is_not_a_second_turn(site, client):
    site.will_reply(site.chat.render_turn("one"))
    await site.start(command())
    attempt = await client.take(wait_s=10.0)
    body = {"model": "policy", "messages": [USER]}
    url = f"{attempt.base_url}/chat/completions"
    texts = []
    async with client.playing(attempt), aiohttp.ClientSession() as http:
        for number in ("0", "1", "2"):
            headers = {
                "Authorization": f"Bearer {attempt.api_key}",
                "x-stainless-retry-count": number,
            }
            async with http.post(url, json=body, headers=headers) as reply:
                texts.append(await reply.read())
        await attempt.end(1.0)
    assert len(await site.turns()) == 1
    assert len(set(texts)) == 1


async def test_the_end_can_be_repeated_and_the_first_one_counts(site, client):
    site.will_reply(site.chat.render_turn("ok"))
    await site.start(command())
    attempt = await client.take(wait_s=10.0)
    async with client.playing(attempt), model(attempt) as agent:
        await agent.chat.completions.create(model="policy", messages=[USER])
        await attempt.end(0.25, files={"a.py": "x = 2\n"}, deleted=["b.bin"], detail="played")
        await site.ends()
        await attempt.end(1.0)
        with pytest.raises(openai.APIStatusError):
            await agent.chat.completions.create(model="policy", messages=[USER])
    [end] = await site.ends()
    assert (end.reported_reward, end.files.changed, end.deleted) == (
        0.25,
        {"a.py": b"x = 2\n"},
        ["b.bin"],
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"reward": 2.0},
        {"reward": float("-1")},
        {"outcome": "solved"},
        {"files": {"../x": ""}},
        {"files": {"/x": ""}},
        {"binaries": {"x": "not base64!"}},
        {"unknown": 1},
        {"files": {str(n): "" for n in range(1025)}},
    ],
)
async def test_a_malformed_end_is_refused_and_the_attempt_stays_open(site, client, fields):
    site.will_reply(site.chat.render_turn("ok"))
    await site.start(command())
    attempt = await client.take(wait_s=10.0)
    async with client.playing(attempt), model(attempt) as agent:
        await agent.chat.completions.create(model="policy", messages=[USER])
        with pytest.raises(RolloutServiceError, match="400"):
            await attempt.end(**fields)
        await attempt.end(1.0)
    assert (await site.ends())[0].reported_reward == 1.0


async def test_keys_open_what_they_are_for(site, client):
    await site.start(command(), command("g0-m1"))
    mine, other = await client.take(10.0), await client.take(10.0)
    with pytest.raises(RolloutServiceError, match="401"):
        await RolloutClient(site.url, "psk-wrong").take()
    async with aiohttp.ClientSession() as http:
        for key in (KEY, other.api_key, "", "é"):
            headers = {
                "Authorization": f"Bearer {key}".encode("utf-8", "replace").decode("latin-1")
            }
            async with http.post(f"{mine.taken.url}/alive", json={}, headers=headers) as reply:
                assert reply.status == 404
        async with http.get(f"{site.url}/openapi.json") as reply:
            document = await reply.json()
    assert "/v1/rollouts/take" in document["paths"]
    assert "AttemptInfo" in document["components"]["schemas"]


async def test_own_code_that_raises_loses_its_attempt_alone(site):
    site.will_reply(*[site.chat.render_turn("ok")] * 3)
    async with site.serving():
        await site.start(*(command(f"g0-m{n}") for n in range(3)))

        async def attempt(one):
            async with model(one) as agent:
                await agent.chat.completions.create(model="policy", messages=[USER])
            if one.taken.member == 1:
                raise RuntimeError("the environment broke")
            return 1.0

        playing = asyncio.create_task(play(site.url, KEY, attempt, num_concurrent=2))
        ends = {end.member: end for end in await site.ends(3)}
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
    assert [ends[n].end for n in range(3)] == [
        EpisodeEnd.FINISHED,
        EpisodeEnd.INFRASTRUCTURE_ERROR,
        EpisodeEnd.FINISHED,
    ]


@pytest.mark.parametrize("site", [{"lease_s": 0.5, "untaken_s_max": 1.0}], indirect=True)
async def test_silent_clients_and_untaken_attempts_end_as_infrastructure(site, client):
    await site.start(command())
    await client.take(wait_s=10.0)
    await site.start(command("g1-m0"))
    ends = {end.rollout_id: end for end in await site.ends(2)}
    assert {end.end for end in ends.values()} == {EpisodeEnd.INFRASTRUCTURE_ERROR}
    assert "silent" in ends["g0-m0"].error
    assert "no client took it" in ends["g1-m0"].error


@pytest.mark.parametrize("bus", ["memory", "nats"], indirect=True)
async def test_a_killed_service_loses_no_attempt_and_counts_none_twice(site):
    site.will_reply(*[site.chat.render_turn("ok")] * 2)
    await site.start(command(), command("g0-m1"))
    async with site.serving():
        client = RolloutClient(site.url, KEY)
        attempt = await client.take(wait_s=10.0)
        async with model(attempt) as agent:
            await agent.chat.completions.create(model="policy", messages=[USER])
        played = attempt.taken.rollout_id
    async with site.serving():
        client = RolloutClient(site.url, KEY)
        other = await client.take(wait_s=30.0)
        async with client.playing(other), model(other) as agent:
            await agent.chat.completions.create(model="policy", messages=[USER])
            await other.end(1.0)
        headers = {"Authorization": f"Bearer {attempt.api_key}"}
        stale = f"{site.url}/v1/rollouts/{played}/end"
        ended = {"json": {"reward": 1.0}, "headers": headers}
        async with aiohttp.ClientSession() as http, http.post(stale, **ended) as reply:
            assert reply.status == 404
        ends = {end.rollout_id: end for end in await site.ends(2)}
    assert len(ends) == 2
    assert ends[played].end is EpisodeEnd.INFRASTRUCTURE_ERROR
    assert len(ends[played].turns) == 1, "its sampled tokens stay on the ledger"
    assert ends[other.taken.rollout_id].end is EpisodeEnd.FINISHED
