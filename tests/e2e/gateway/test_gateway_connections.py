"""Connections that say half of what they want: closed in time, and nobody is shut out."""

import asyncio

import aiohttp
import pytest

from .conftest import Site

GOOD = {"model": "policy", "messages": [{"role": "user", "content": "Fix add."}]}
HEADERS = {"Authorization": "Bearer psk-test"}
HALF_HEADER = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
HALF_BODY = HALF_HEADER + b"%sContent-Length: 1000\r\n\r\n{"
KEY = b"Authorization: Bearer psk-test\r\n"


async def connect(site: Site, data: bytes) -> asyncio.StreamReader:
    host, port = site.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    reader.writer = writer  # keeps it open
    return reader


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(20):
        data = await reader.read()
    reader.writer.close()
    return data


async def test_half_a_header_or_body_is_closed_after_its_deadline(bus, tmp_path, tokenizer):
    site = Site(bus, tmp_path, tokenizer, header_s_max=0.3, body_s_max=0.3)
    async with site.running():
        halves = [HALF_HEADER, b"", HALF_BODY % KEY, HALF_BODY % b"", HALF_HEADER[:7]]
        readers = [await connect(site, half) for half in halves * 20]
        answers = await asyncio.gather(*(until_closed(reader) for reader in readers))
    assert answers[0] == b"", "nothing to answer"
    assert answers[2].startswith(b"HTTP/1.1 408")
    assert b'"code":"request_timeout"' in answers[2]
    assert answers[3].startswith(b"HTTP/1.1 401")


async def test_open_connections_shut_nobody_out(bus, tmp_path, tokenizer):
    site = Site(bus, tmp_path, tokenizer, num_connections_max=8)
    async with site.running(), aiohttp.ClientSession(site.url, headers=HEADERS) as http:
        held = [await connect(site, HALF_HEADER) for _ in range(30)]
        site.will_reply(site.chat.render_turn("ok"))
        reply = await http.post("/v1/chat/completions", json=GOOD)
        assert reply.status == 200
        assert await until_closed(held[0]) == b"", "the oldest made room"
        for reader in held:
            reader.writer.close()


async def test_where_every_connection_is_at_work_another_is_refused(bus, tmp_path, tokenizer):
    site = Site(bus, tmp_path, tokenizer, num_connections_max=1)
    async with site.running(), aiohttp.ClientSession(site.url, headers=HEADERS) as http:
        site.generator.gate.clear()
        site.will_reply(site.chat.render_turn("ok"))
        first = asyncio.create_task(http.post("/v1/chat/completions", json=GOOD))
        while not site.generator.asked:
            await asyncio.sleep(0.01)
        assert (await until_closed(await connect(site, b""))).startswith(b"HTTP/1.1 503")
        site.generator.gate.set()
        assert (await first).status == 200


@pytest.mark.slow
async def test_a_thousand_half_connections_are_closed_and_shut_nobody_out(bus, tmp_path, tokenizer):
    """With the shipped bound of connections, and in the deadline of one."""
    site = Site(bus, tmp_path, tokenizer, header_s_max=3.0, body_s_max=3.0)
    other = {"Authorization": "Bearer psk-other"}
    async with site.running(), aiohttp.ClientSession(site.url, headers=other) as http:
        halves = [HALF_HEADER, HALF_BODY % KEY, HALF_HEADER[:7], b""] * 250
        ends: list[asyncio.Task[bytes]] = []
        for number, half in enumerate(halves):
            ends.append(asyncio.create_task(until_closed(await connect(site, half))))
            if number % 250 == 249:
                site.will_reply(site.chat.render_turn("ok"))
                reply = await http.post("/v1/chat/completions", json=GOOD)
                assert reply.status == 200
        answers = await asyncio.gather(*ends)
        assert len(answers) == 1000
        told = {answer.split(b" ")[1] for answer in answers if answer}
        assert told <= {b"408", b"429"}, "too late, or more at once than the key may have"
        server = site.gateway._listener._runner.server
        assert len(server.connections) <= 1, "the good client's own"
