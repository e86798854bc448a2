"""Several replicas behind the gateway: sessions stay with one, and move when it is gone."""

import msgspec
import openai

from penstock.actors.policy.replicas.table import preferred
from penstock.messages.feedback import InferenceRecorded

from .conftest import Reply, ScriptedGenerator, Site, reported, until

USER = [{"role": "user", "content": "add"}]
NAMES = ("west.a", "west.b")


async def test_a_session_stays_with_its_replica_and_moves_in_the_middle_of_a_reply(
    bus, tmp_path, tokenizer
):
    site = Site(bus, tmp_path, tokenizer)
    replicas = {name: ScriptedGenerator(name) for name in NAMES}
    own = preferred("talk", NAMES)
    (other,) = {*NAMES} - {own}
    site.generator = replicas[own]
    ids = site.chat.render_turn("return a + b")
    async with (
        site.running(replicas[other]),
        openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="psk-test") as client,
    ):
        session = {"X-Session-Id": "talk"}
        await until(lambda: len(site.gateway._services.replicas.ready("live")) == 2)
        for _ in range(3):
            site.will_reply(ids)
            await client.chat.completions.create(
                model="policy", messages=USER, extra_headers=session
            )
        assert (len(replicas[own].asked), len(replicas[other].asked)) == (3, 0)

        site.will_reply(ids, num_chunk=2, pause_after=1)
        replicas[other].replies.append(Reply(token_ids=ids[2:]))
        stream = await client.chat.completions.create(
            model="policy", messages=USER, stream=True, extra_headers=session
        )
        replicas[own].policy_version = -1
        await bus.publish([msgspec.structs.replace(reported(7, own), is_leaving=True)])
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "return a + b"
        assert len(replicas[other].asked) == 1
        replicas[own].resume.set()
    record = (await site.events(InferenceRecorded))[-1]
    assert (await site.turn(record)).token_ids.shape == (len(ids),)
