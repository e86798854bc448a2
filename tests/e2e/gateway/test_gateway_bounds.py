"""Requests that end early: clients that leave, gateways that are full, slow or stopping."""

import asyncio

import aiohttp

from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.gateway.keys import hash_key
from penstock.messages.feedback import InferenceRecorded
from penstock.messages.rollout import StopReason

from .conftest import Site, until

GOOD = {"model": "policy", "messages": [{"role": "user", "content": "Fix add."}]}
HEADERS = {"Authorization": "Bearer psk-test"}


async def ask(http: aiohttp.ClientSession, **fields):
    return await http.post("/v1/chat/completions", json=GOOD | fields, headers=HEADERS)


async def code(reply: aiohttp.ClientResponse) -> str:
    return (await reply.json())["error"]["code"]


async def test_a_client_that_leaves_ends_the_sampling_and_what_it_got_is_recorded(
    bus, tmp_path, tokenizer
):
    site = Site(bus, tmp_path, tokenizer)
    ids = PenstockChat(tokenizer).render_turn("return a + b " * 20)
    async with site.running(), aiohttp.ClientSession(site.url) as http:
        site.will_reply(ids, num_chunk=2, pause_after=2)
        reply = await ask(http, stream=True)
        await reply.content.readline()
        reply.close()
        site.generator.resume.set()
        await until(lambda: site.generator.aborted)
        await asyncio.sleep(0)
    (record,) = await site.events(InferenceRecorded)
    assert (await site.turn(record)).stop_reason is StopReason.ABORTED
    assert 0 < (await site.turn(record)).token_ids.shape[0] < len(ids)


async def test_a_full_gateway_refuses_and_recovers(bus, tmp_path, tokenizer):
    site = Site(bus, tmp_path, tokenizer, num_requests_max=1)
    async with site.running(), aiohttp.ClientSession(site.url) as http:
        site.generator.gate.clear()
        site.will_reply(PenstockChat(tokenizer).render_turn("ok"))
        first = asyncio.create_task(ask(http))
        await until(lambda: site.generator.asked)
        refused = await ask(http)
        assert (refused.status, await code(refused)) == (503, "overloaded")
        assert (await refused.json())["error"]["message"] == "the gateway is at capacity"
        assert refused.headers["Retry-After"]
        site.generator.gate.set()
        assert (await first).status == 200
        site.will_reply(PenstockChat(tokenizer).render_turn("ok"))
        assert (await ask(http)).status == 200


async def test_a_reply_that_takes_too_long_is_a_clean_error(bus, tmp_path, tokenizer):
    site = Site(bus, tmp_path, tokenizer, request_s_max=0.3)
    async with site.running(), aiohttp.ClientSession(site.url) as http:
        for stream in (False, True):
            site.will_reply(
                PenstockChat(tokenizer).render_turn("ok" * 9), num_chunk=2, pause_after=0
            )
            reply = await ask(http, stream=stream)
            assert (reply.status, await code(reply)) == (504, "deadline_exceeded")
        for _ in range(20):  # A slow process meets the deadline before the first chunk.
            ids = PenstockChat(tokenizer).render_turn("ok" * 9)
            site.will_reply(ids, num_chunk=2, pause_after=1)
            reply = await ask(http, stream=True)
            if reply.status == 200:
                break
        assert reply.status == 200
        text = await reply.text()
        assert '"code":"deadline_exceeded"' in text
        assert "[DONE]" not in text
        site.generator.resume.set()


async def test_an_open_reply_outlives_the_order_to_stop(bus, tmp_path, tokenizer):
    site = Site(bus, tmp_path, tokenizer)
    async with site.running(), aiohttp.ClientSession(site.url) as http:
        site.will_reply(
            PenstockChat(tokenizer).render_turn("return a + b"), num_chunk=2, pause_after=1
        )
        reply = await ask(http, stream=True)
        stopping = asyncio.create_task(site.stop_gateway())
        await until_refused(site.url)
        site.generator.resume.set()
        assert (await reply.text()).endswith("data: [DONE]\n\n")
        await stopping
    assert len(await site.events(InferenceRecorded)) == 1


async def test_a_gateway_that_starts_again_knows_its_sessions_from_the_log(
    bus, tmp_path, tokenizer
):
    first = Site(bus, tmp_path, tokenizer)
    session = {"X-Session-Id": "s1"}
    async with first.running(), aiohttp.ClientSession(first.url, headers=session) as http:
        first.will_reply(PenstockChat(tokenizer).render_turn("ok"))
        request_id = (await (await ask(http)).json())["id"]
    second = Site(bus, tmp_path, tokenizer)
    body = {"session_id": "s1", "name": "accept", "value": 1}
    async with second.running(), aiohttp.ClientSession(second.url) as http, asyncio.timeout(20):
        while (reply := await http.post("/v1/feedback", json=body, headers=HEADERS)).status == 404:
            await asyncio.sleep(0.02)
        assert (await reply.json())["request_id"] == request_id


async def test_further_keys_come_from_a_file(bus, tmp_path, tokenizer):
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nkey_id = "team"\nkey_hash = "{hash_key("psk-team")}"\n')
    site = Site(bus, tmp_path, tokenizer, keys_file=str(path))
    async with site.running(), aiohttp.ClientSession(site.url) as http:
        reply = await http.get("/v1/models", headers={"Authorization": "Bearer psk-team"})
        assert reply.status == 200


async def until_refused(url: str) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                async with aiohttp.ClientSession(url) as http:
                    await http.get("/healthz")
            except aiohttp.ClientConnectionError:
                return
            await asyncio.sleep(0.02)
