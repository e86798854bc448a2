"""Keys come and go while the gateway runs; one may have its greedy requests sampled."""

import logging

import aiohttp
import pytest

from penstock.gateway.keys import hash_key
from penstock.messages.feedback import InferenceRecorded

from .conftest import Site, eventually, until


def table(name: str, secret: str, **fields: object) -> str:
    lines = [f"{field} = {str(value).lower()}" for field, value in fields.items()]
    return "\n".join(
        ["[[keys]]", f'key_id = "{name}"', f'key_hash = "{hash_key(secret)}"', *lines, ""]
    )


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(table("ann", "psk-ann") + table("bob", "psk-bob"))
    return path


async def test_a_changed_file_counts_and_a_wrong_one_changes_nothing(
    bus, tmp_path, tokenizer, file, caplog
):
    site = Site(bus, tmp_path, tokenizer, keys_file=str(file))
    site.gateway.tick_s = 0.02

    async def status(secret: str) -> int:
        headers = {"Authorization": f"Bearer {secret}"}
        async with session.get(f"{site.url}/v1/models", headers=headers) as answer:
            return answer.status

    async def becomes(secret: str, expected: int) -> None:
        rings = site.gateway._keys
        before = rings.ring
        await until(lambda: rings.ring is not before)
        assert await status(secret) == expected

    async with site.running(), aiohttp.ClientSession() as session:
        assert [await status(f"psk-{name}") for name in ("ann", "bob", "eve")] == [200, 200, 401]
        file.write_text(table("ann", "psk-ann") + table("eve", "psk-eve"))
        await becomes("psk-bob", 401)
        assert await status("psk-eve") == 200

        for wrong in (table("ann", "psk-ann") * 2, "[[keys]]\nkey = 1\n", "= no TOML"):
            caplog.clear()
            with caplog.at_level(logging.ERROR):
                file.write_text(wrong)
                await until(lambda: "the keys stay as they were" in caplog.text)
            assert "gateway.keys_file: " in caplog.text
            assert await status("psk-eve") == 200
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            file.unlink()
            await until(lambda: "its keys are revoked" in caplog.text)
        assert await status("psk-eve") == 401
        assert await status("psk-test") == 200, "the run's own keys are in no file"

        file.write_text(table("ann", "psk-ann"))
        await becomes("psk-ann", 200)


async def test_a_lower_limit_holds_at_once(bus, tmp_path, tokenizer, file):
    file.write_text(table("ann", "psk-ann", rpm_limit=5))
    site = Site(bus, tmp_path, tokenizer, keys_file=str(file))
    site.gateway.tick_s = 0.02
    headers = {"Authorization": "Bearer psk-ann"}
    body = {"model": "policy", "messages": [{"role": "user", "content": "add"}]}
    async with site.running(), aiohttp.ClientSession(headers=headers) as session:
        await until(lambda: site.gateway._services.replicas.ready("live"))

        async def ask() -> int:
            site.will_reply(site.chat.render_turn("a"))
            url = f"{site.url}/v1/chat/completions"
            async with session.post(url, json=body) as answer:
                return answer.status

        assert await ask() == 200
        before = site.gateway._keys.ring
        file.write_text(table("ann", "psk-ann", rpm_limit=1))
        await until(lambda: site.gateway._keys.ring is not before)
        assert await ask() == 200, "of one minute's allowance"
        assert await ask() == 429


GOOD = {"model": "policy", "messages": [{"role": "user", "content": "Fix add."}]}
"""A client's request."""


@pytest.mark.parametrize(
    ("secret", "asked", "sampled"),
    [("psk-explorer", 0.0, 1.0), ("psk-explorer", 0.3, 0.3), ("psk-test", 0.0, 0.0)],
)
async def test_a_key_that_explores_is_sampled_at_the_runs_temperature(site, secret, asked, sampled):
    site.will_reply(site.chat.render_turn("ok"))
    headers = {"Authorization": f"Bearer {secret}"}
    async with aiohttp.ClientSession(site.url, headers=headers) as http:
        reply = await http.post("/v1/chat/completions", json=GOOD | {"temperature": asked})
        assert reply.status == 200, await reply.text()
    told = reply.headers.get("x-sampled-temperature")
    assert told == (None if asked == sampled else "1")
    assert site.generator.asked[0].sampling.temperature == sampled
    [record] = await eventually(site, InferenceRecorded)
    turn = await site.turn(record)
    assert turn.sampling is not None and turn.sampling.temperature == sampled
