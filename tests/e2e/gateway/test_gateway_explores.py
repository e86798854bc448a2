"""Requests at temperature 0 teach nothing: a key may have them sampled, and is told so."""

import aiohttp
import pytest

from penstock.messages.feedback import InferenceRecorded

from .conftest import eventually

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
