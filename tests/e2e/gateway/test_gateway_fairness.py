"""What one key may store as feedback, and whose feedback counts."""

import asyncio
import time

import aiohttp
import msgspec
import pytest

from penstock.actors.feedback.actor import FeedbackJoiner
from penstock.actors.feedback.config import BurstConfig, JoinConfig
from penstock.actors.judge.rubric.config import CriterionConfig
from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.rollout_worker.conversation import offered_tools
from penstock.gateway.keys import KeySpec, hash_key
from penstock.infra.commands.quarantine import held_bursts, release
from penstock.infra.corpora.preferences import read_preferences
from penstock.infra.export.preferences import PreferenceReader, standing
from penstock.infra.judge.calibrate import standing_labels
from penstock.messages.errors import NotFoundError
from penstock.messages.feedback import FeedbackReceived, InferenceRecorded, LiveSampleJoined
from penstock.messages.reading.trajectories import last_of
from penstock.messages.signals.preferences import Label, PreferencePair
from penstock.messages.streams import STREAMS

from .conftest import KEYS, Site, stored_id

GOOD = {"model": "policy", "messages": [{"role": "user", "content": "Fix add."}]}


def bearer(secret: str = "psk-test") -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


async def ask(site: Site, http: aiohttp.ClientSession) -> str:
    site.will_reply(site.chat.render_turn("ok"))
    reply = await http.post("/v1/chat/completions", json=GOOD, headers=bearer())
    assert reply.status == 200
    return (await reply.json())["id"]


async def test_a_flood_of_feedback_is_refused_before_it_is_stored(site):
    async with aiohttp.ClientSession(site.url) as http:
        body = {"request_id": await ask(site, http), "name": "accept", "value": 1}
        body |= {"comment": "x" * 16_000}
        began, statuses = time.monotonic(), []
        for number in range(200):
            reply = await http.post("/v1/feedback", json=body, headers=bearer())
            statuses.append(reply.status)
            if number >= 100 and reply.status != 200:
                break
        error, minutes = (await reply.json())["error"], (time.monotonic() - began) / 60
    assert statuses[0] == 200
    assert error["code"] == "feedback_limit_exceeded" and int(reply.headers["Retry-After"]) > 0
    assert "256 KiB" in error["message"]
    allowed = (256 << 10) * (1 + minutes) / 16_000 + 1
    assert len(await site.events(FeedbackReceived)) == statuses.count(200) <= allowed


@pytest.fixture
def small(monkeypatch):
    """Have the stream of signals hold little."""
    spec = STREAMS[FeedbackReceived.stream]
    small = msgspec.structs.replace(spec, max_bytes=4000)
    monkeypatch.setitem(STREAMS, FeedbackReceived.stream, small)


async def test_a_full_stream_of_signals_refuses_no_record_of_a_request(small, site):
    async with aiohttp.ClientSession(site.url) as http:
        body = {"request_id": await ask(site, http), "name": "accept", "value": 1}
        body |= {"comment": "x" * 1000}
        statuses = [
            (await http.post("/v1/feedback", json=body, headers=bearer())).status for _ in range(8)
        ]
        assert set(statuses) == {200, 503}
        await ask(site, http)
    assert len(await site.events(InferenceRecorded)) == 2


@pytest.mark.parametrize("is_trusted", [False, True])
async def test_a_trusted_key_judges_requests_of_others(
    bus, tmp_path, tokenizer, monkeypatch, is_trusted
):
    """There is one list of trust: what the gateway lets in, the join counts."""
    ci = KeySpec(key_id="ci", key_hash=hash_key("psk-ci"), is_trusted=is_trusted)
    monkeypatch.setattr("tests.e2e.gateway.conftest.KEYS", (*KEYS, ci))
    site = Site(bus, tmp_path, tokenizer)
    joiner = FeedbackJoiner(JoinConfig(reward_wait_s=0.0))
    async with site.running(joiner), aiohttp.ClientSession(site.url) as http:
        body = {"request_id": await ask(site, http), "name": "tests_passed", "value": 1}
        reply = await http.post("/v1/feedback", json=body, headers=bearer("psk-ci"))
        assert reply.status == (200 if is_trusted else 403)
        if is_trusted:
            joined: list[LiveSampleJoined] = []
            async for delivery in bus.follow([LiveSampleJoined]):
                joined.append(delivery.event)
                break
            assert joined[0].reward == 1.0


async def test_a_burst_is_held_is_seen_and_is_released_by_name(bus, tmp_path, tokenizer):
    site = Site(bus, tmp_path, tokenizer)
    burst = BurstConfig(num_min=3)
    joiner = FeedbackJoiner(JoinConfig(reward_wait_s=0.0, burst=burst))
    joiner.tick_s = 0.05
    async with site.running(joiner), aiohttp.ClientSession(site.url) as http:
        for _ in range(5):
            body = {"request_id": await ask(site, http), "name": "accept", "value": 1}
            assert (await http.post("/v1/feedback", json=body, headers=bearer())).status == 200
        async with asyncio.timeout(20):
            while not (held := await held_bursts(bus)):
                await asyncio.sleep(0.05)
            while len(await site.events(LiveSampleJoined)) < 3:
                await asyncio.sleep(0.05)
        assert len(await site.events(LiveSampleJoined)) == 3
        with pytest.raises(NotFoundError, match="expected one of the run's quarantines"):
            await release(bus, "nobody.1")
        await release(bus, held[0].key())
        assert await held_bursts(bus) == []
        assert await joined_after_echo(joiner, site) == 5


async def joined_after_echo(joiner, site) -> int:
    """Have the join offer again what the log does not show, as it does after a minute."""
    join = joiner._join
    while joiner._bursts.num_held:
        await asyncio.sleep(0.05)
    join._published.clear()
    join._wake = [(0.0, key) for _, key in join._wake]
    async with asyncio.timeout(20):
        while len(found := await site.events(LiveSampleJoined)) < 5:
            await asyncio.sleep(0.05)
    return len(found)


async def test_a_correction_is_exported_as_a_pair_and_a_retracted_label_is_not(
    bus, tmp_path, tokenizer
):
    site = Site(bus, tmp_path, tokenizer)
    joiner = FeedbackJoiner(JoinConfig(reward_wait_s=0.0))
    async with site.running(joiner), aiohttp.ClientSession(site.url) as http:
        body = {"request_id": await ask(site, http), "feedback_id": "f1", "value": 1}
        further = {"name": "correction", "correction": "return a + b"}
        assert (
            await http.post("/v1/feedback", json=body | further, headers=bearer())
        ).status == 200
        for number in (2, 3):
            judged = body | {"name": "reject", "feedback_id": f"f{number}"}
            await http.post("/v1/feedback", json=judged, headers=bearer())
        await http.delete("/v1/feedback/f3", headers=bearer())
        async with asyncio.timeout(20):
            while len(await site.events(Label)) < 2 or not await site.events(PreferencePair):
                await asyncio.sleep(0.05)
        reader = PreferenceReader(
            site.store, site.vault(), last_of(bus), tokenizer, PenstockChat(tokenizer)
        )
        lines = [await reader.line(event) for event in await standing(bus)]
        texts = PreferenceReader(site.store, site.vault(), last_of(bus), tokenizer, chat=None)
        judged = await standing_labels(bus, texts, CriterionConfig(name="good", text="Is it?"))
        await site.vault().erase("user/k-user")
        erased = PreferenceReader(
            site.store, site.vault(), last_of(bus), tokenizer, PenstockChat(tokenizer)
        )
        assert [await erased.line(event) for event in await standing(bus)] == [None, None]
    [one] = judged  # What a rubric judge is calibrated with.
    assert (one.criterion, one.choice, one.final.startswith("ok")) == ("good", "no", True)
    assert "Fix add." in one.task
    pair, label = sorted(lines, key=lambda line: "label" in line)
    assert pair["chosen"][0].content == "return a + b"
    assert pair["rejected"][0].content.startswith("ok")
    assert any("Fix add." in each.content for each in pair["prompt"])
    assert pair["metadata"]["feedback"] == f"user.{stored_id('f1')}" and pair["tools"] == []
    assert (label["label"], label["metadata"]["feedback"]) == (False, f"user.{stored_id('f2')}")
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(msgspec.json.encode(pair) + b"\n" + msgspec.json.encode(label))
    chat = PenstockChat(tokenizer)
    read = list(read_preferences([str(path)], chat, offered_tools("1"), 4096))
    assert tokenizer.decode(read[0].chosen.token_ids[:-1]) == "return a + b"
    assert read[0].context == read[1].context and read[1].chosen is None
