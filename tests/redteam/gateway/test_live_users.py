"""Attacks on a live service: consent by every route, trust, sessions, keys file, spool."""

import asyncio
import logging
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.e2e.gateway.conftest import Site, until

from penstock.gateway.exchange.retried import HEADER as IDEMPOTENCY
from penstock.gateway.exchange.spool import Spool
from penstock.gateway.keys import hash_key, load_keys
from penstock.infra.privacy.command import erase_all
from penstock.infra.run.runs import RunDir
from penstock.messages.errors import ConfigError, NotFoundError
from penstock.messages.feedback import (
    FeedbackReceived,
    InferenceCounted,
    InferenceRecorded,
    LiveSampleJoined,
)
from penstock.messages.reading.sealed import SealedTurn
from penstock.messages.requests.gateways import ReplyKept
from penstock.messages.rollout import TurnSummary
from penstock.messages.rpc import Ack

WORDS = "my-very-own-words"
CHAT = {"model": "policy", "messages": [{"role": "user", "content": WORDS}]}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": "policy", "input": WORDS},
    "/v1/messages": CHAT | {"max_tokens": 20},
    "/v1/completions": {"model": "policy", "prompt": WORDS},
    "/inference/v1/generate": {"model": "policy", "token_ids": [1, 2, 3]},
}
REFUSALS = ({"store": False}, {"metadata": {"storage_consent": "false"}})
HEADERS = {"Authorization": "Bearer psk-test"}


@pytest.fixture
async def http(site):
    async with aiohttp.ClientSession(site.url, headers=HEADERS) as session:
        yield session


async def ask(site: Site, http, route: str = "/v1/chat/completions", headers=None, **fields):
    site.will_reply(site.chat.render_turn("return a + b"))
    async with http.post(route, json=BODIES[route] | fields, headers=headers or {}) as reply:
        return reply.status, reply.headers, await reply.json()


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_every_route_takes_consent_back(site, http, refusal):
    for route in BODIES:
        status, headers, _ = await ask(site, http, route, **refusal)
        assert status == 200
        assert not {"store", "metadata"} & set(headers.get("x-penstock-ignored", "").split(", "))
    assert await site.events(InferenceRecorded) == []
    assert len(await site.events(InferenceCounted)) == len(BODIES)


async def test_every_route_takes_consent_to_training_back(site, http):
    for route in BODIES:
        await ask(site, http, route, metadata={"training_consent": "false"})
    records = await site.events(InferenceRecorded)
    assert [record.training_consent for record in records] == [False] * len(BODIES)


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_reply_that_may_not_be_stored_is_not_kept_for_a_retry(site, http, refusal):
    status, _, _ = await ask(site, http, headers={IDEMPOTENCY: "once"}, **refusal)
    assert status == 200
    assert all(not kept.reply for kept in await site.events(ReplyKept))


async def test_of_feedback_on_an_unstored_request_only_name_and_value_are_stored(site, http):
    _, _, reply = await ask(site, http, store=False, user="alice")
    body = {"request_id": reply["id"], "name": "accept", "value": 1, "user": "alice"}
    body |= {"source": WORDS, "occurred_at": WORDS, "comment": WORDS}
    async with http.post("/v1/feedback", json=body) as answer:
        assert answer.status == 200
    (event,) = await site.events(FeedbackReceived)
    assert (event.source, event.occurred_at, event.content, event.user) == ("", "", None, "k-user")


async def test_only_a_trusted_key_changes_what_a_trusted_key_gave(bus, tmp_path, tokenizer):
    """A tenant's tests judge its agent; the agent's own key must not judge with their weight."""
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "".join(
            f'[[keys]]\nkey_id = "{name}"\ntenant = "acme"\nkey_hash = "{hash_key(name)}"\n'
            f"is_trusted = {trusted}\n"
            for name, trusted in (("agent", "false"), ("tests", "true"))
        )
    )
    site = Site(bus, tmp_path, tokenizer, keys_file=str(keys))
    agent, tests = ({"Authorization": f"Bearer {name}"} for name in ("agent", "tests"))
    async with site.running(), aiohttp.ClientSession(site.url) as http:
        body = {"request_id": "r", "name": "accept", "value": 0, "feedback_id": "f"}
        assert (await http.post("/v1/feedback", json=body, headers=tests)).status == 200
        change = {"value": 1}
        answer = await http.patch("/v1/feedback/f", json=change, headers=agent)
        assert (answer.status, (await answer.json())["error"]["code"]) == (403, "not_trusted")
        assert (await http.delete("/v1/feedback/f", headers=agent)).status == 403
        assert (await http.patch("/v1/feedback/f", json=change, headers=tests)).status == 200
        assert (await http.delete("/v1/feedback/f", headers=tests)).status == 200


async def test_a_keys_file_cut_within_a_character_changes_nothing(bus, tmp_path, tokenizer, caplog):
    keys = tmp_path / "keys.toml"
    whole = f'# é\n[[keys]]\nkey_id = "ann"\nkey_hash = "{hash_key("ann")}"\n'.encode()
    keys.write_bytes(whole)
    site = Site(bus, tmp_path, tokenizer, keys_file=str(keys))
    site.gateway.tick_s = 0.02
    async with site.running(), aiohttp.ClientSession(site.url) as http:
        with caplog.at_level(logging.ERROR):
            keys.write_bytes(whole[:3])
            await until(lambda: "the keys stay as they were" in caplog.text)
        answer = await http.get("/v1/models", headers={"Authorization": "Bearer ann"})
        assert answer.status == 200
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        load_keys(keys)


def recorded(site: Site, user: str) -> InferenceRecorded:
    """Return what a gateway writes to disk while the log is away."""
    sealed = site.vault().seal_for_later("r", b"turn")
    summary = TurnSummary(num_context=1, num_sampled=1, version_spans=[])
    return InferenceRecorded(
        request_id="r", session_id="s", key_id="user", tenant="user", user=user,
        training_consent=True, variant="default", propensity=1.0, policy_version=7, replica="west",
        turn=SealedTurn(summary=summary, sealed=sealed),
    )  # fmt: skip


async def test_records_on_disk_that_nobody_can_read_hold_nothing_up(bus, tmp_path, tokenizer):
    site = Site(bus, tmp_path, tokenizer)
    folder = tmp_path / "spool"
    spool = Spool(folder, 1 << 20)
    spool.put("0-no-event", Ack())
    whole = recorded(site, "u-a")
    spoilt = msgspec.structs.replace(whole.turn.sealed, data=b"x" * 40)
    turn = msgspec.structs.replace(whole.turn, sealed=spoilt)
    spool.put("1-spoilt", msgspec.structs.replace(whole, turn=turn))
    (folder / "2-folder.record").mkdir()
    spool.put("3-whole", whole)
    async with site.running(), aiohttp.ClientSession(site.url, headers=HEADERS) as http:
        await until(lambda: not list(folder.glob("*.record")))
        assert [event.request_id for event in await site.events(InferenceRecorded)] == ["r"]
        assert (await ask(site, http))[0] == 200
    assert len(list(folder.glob("*.bad"))) == 3


def test_two_gateways_may_count_and_empty_one_spool(tmp_path, monkeypatch):
    spool = Spool(tmp_path, 1 << 20)
    spool.put("a", Ack())
    names = list(tmp_path.glob("*"))
    names[0].unlink()
    monkeypatch.setattr(Path, "glob", lambda *_: names)  # Found, then gone.
    spool.count()
    assert spool.is_empty and not list(spool.waiting())


async def test_what_waits_on_disk_is_erased_with_its_user(bus, tmp_path, tokenizer):
    site = Site(bus, tmp_path, tokenizer)
    run = RunDir(tmp_path)
    spool = Spool(run.gateway_spool, 1 << 20)
    for user in ("u-a", "u-b"):
        spool.put(user, recorded(site, user))
    erasure = await erase_all(run, bus, site.vault(), "user", "u-a")
    assert erasure.num_requests == 1
    assert [record.user for _, record in spool.waiting()] == ["u-b"]
    with pytest.raises(NotFoundError):
        await erase_all(run, bus, site.vault(), "user", "u-a")


async def test_a_user_who_names_another_s_session_has_a_sample_of_their_own(site, http):
    """Else one user's turns are trained, capped, rolled out and erased as another's."""
    for user in ("alice", "bob"):
        _, _, reply = await ask(site, http, headers={"X-Session-Id": "s"}, user=user)
        body = {"request_id": reply["id"], "name": "accept", "value": 1}
        assert (await http.post("/v1/feedback", json=body)).status == 200
    async with asyncio.timeout(20.0):
        while len(samples := await site.events(LiveSampleJoined)) < 2:
            await asyncio.sleep(0.02)
    owners = {record.request_id: record.user for record in await site.events(InferenceRecorded)}
    assert len(set(owners.values())) == 2
    assert {one.user for one in samples} == set(owners.values())
    assert all(owners[name] == one.user for one in samples for name in one.request_ids)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
async def test_a_record_does_not_grow_with_ids_that_end_a_reply(site, http, route):
    body = BODIES[route] | {"stop_token_ids": [1] * 100_000}
    async with http.post(route, json=body) as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]["param"] == "stop_token_ids"
    assert not site.generator.asked
