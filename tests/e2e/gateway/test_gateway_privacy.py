"""What the log keeps of users, by consent: found nowhere else, decoded or raw."""

import asyncio
import contextlib

import aiohttp
import pytest

from penstock.gateway.services import RequestIndex
from penstock.infra.privacy.erase import erase
from penstock.messages.base import Event
from penstock.messages.codec import EVENTS, encode
from penstock.messages.errors import ErasedError
from penstock.messages.feedback import (
    FeedbackReceived,
    InferenceCounted,
    InferenceRecorded,
    LiveSampleJoined,
    UserErased,
)
from penstock.messages.reward import Outcome
from penstock.messages.streams import STREAMS, Retention
from penstock.messages.training import BatchManifest, SampleEntry, StepCompleted

from .conftest import Site, eventually

SECRET_TEXT = "my-very-own-words"


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.fixture
async def http(site):
    async with aiohttp.ClientSession(site.url) as session:
        yield session


async def ask(site: Site, http, secret: str = "psk-test", **fields) -> dict:
    site.will_reply(site.chat.render_turn("return a + b"))
    body = {"model": "policy", "messages": [{"role": "user", "content": SECRET_TEXT}]}
    reply = await http.post("/v1/chat/completions", json=body | fields, headers=bearer(secret))
    assert reply.status == 200, await reply.text()
    return await reply.json()


async def rate(http, secret: str, request_id: str, **fields) -> dict:
    body = {"request_id": request_id, "name": "accept", "value": 1, "comment": SECRET_TEXT}
    reply = await http.post("/v1/feedback", json=body | fields, headers=bearer(secret))
    assert reply.status == 200, await reply.text()
    return await reply.json()


def is_log(kind: type[Event]) -> bool:
    return STREAMS[kind.stream].retention is Retention.LIMITS


async def everything(site: Site, folder) -> bytes:
    """Return all events as they are stored, and all objects and files."""
    kinds = [kind for kind in EVENTS if is_log(kind)]
    stored = [encode(d.event) async for d in site.bus.follow(kinds, stop_at_end=True)]
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return b"\0".join([*stored, *files])


NO_CONSENT = [
    ("psk-private", {}),
    ("psk-test", {"store": False}),
    ("psk-test", {"metadata": {"storage_consent": "false"}}),
]


@pytest.mark.parametrize(("secret", "fields"), NO_CONSENT)
async def test_without_consent_to_storage_the_log_has_counts_alone(
    site, http, tmp_path, secret, fields
):
    reply = await ask(site, http, secret, user="alice", **fields)
    await rate(http, secret, reply["id"], correction=SECRET_TEXT, user="alice")
    assert await site.events(InferenceRecorded) == []
    (counted,) = await site.events(InferenceCounted)
    usage = reply["usage"]
    counts = (counted.turn.num_context, counted.turn.num_sampled)
    assert counts == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (counted.request_id, counted.policy_version) == (reply["id"], 7)
    (feedback,) = await site.events(FeedbackReceived)
    assert feedback.content is None and feedback.value == 1.0
    found = await everything(site, tmp_path)
    ids = site.generator.asked[0].token_ids.data
    for needle in (SECRET_TEXT.encode(), b"return a + b", b"alice", ids):
        assert needle not in found
    assert b"content-keys" not in found and not (tmp_path / "objects" / "content-keys").exists()


async def test_with_consent_content_is_stored_but_sealed(site, http, tmp_path):
    reply = await ask(site, http, user="alice")
    given = await rate(http, "psk-test", reply["id"], correction=SECRET_TEXT)
    (record,) = await site.events(InferenceRecorded)
    turn = await site.turn(record)
    assert turn.context_ids.data == site.generator.asked[0].token_ids.data
    (feedback,) = await site.events(FeedbackReceived)
    assert feedback.user == record.user and feedback.content is not None
    found = await everything(site, tmp_path)
    for needle in (SECRET_TEXT.encode(), b"return a + b", b"alice", turn.context_ids.data):
        assert needle not in found
    url = f"/v1/feedback/{given['feedback_id']}"
    await http.patch(url, json={"comment": "changed"}, headers=bearer("psk-test"))
    amended = (await site.events(FeedbackReceived))[-1]
    content = await site.feedback_content(amended)
    assert (content.comment, content.correction) == ("changed", SECRET_TEXT)


async def test_consent_to_training_is_another_one(site, http):
    await ask(site, http, metadata={"training_consent": "false"})
    await ask(site, http, metadata={"training_consent": "true"})
    await ask(site, http, "psk-other", metadata={"training_consent": "true"})
    records = await site.events(InferenceRecorded)
    assert [record.training_consent for record in records] == [False, True, False]


@pytest.mark.parametrize("name", ["training_consent", "storage_consent"])
async def test_a_consent_that_is_neither_true_nor_false_is_refused(site, http, name):
    body = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
    body |= {"metadata": {name: "perhaps"}}
    reply = await http.post("/v1/chat/completions", json=body, headers=bearer("psk-test"))
    assert (reply.status, (await reply.json())["error"]["param"]) == (400, f"metadata.{name}")
    assert not site.generator.asked


async def opened(site: Site) -> bytes:
    """Return all of users' content that a holder of store, keys and log can read."""
    found: list[bytes] = []
    for record in await site.events(InferenceRecorded):
        with contextlib.suppress(ErasedError):
            turn = await site.turn(record)
            found += [turn.context_ids.data, turn.token_ids.data]
    for event in await site.events(FeedbackReceived):
        with contextlib.suppress(ErasedError):
            found.append((await site.feedback_content(event)).comment.encode())
    return b"\0".join(found)


@pytest.mark.parametrize("bus", ["nats"], indirect=True)
async def test_what_an_erased_user_wrote_is_found_before_and_nowhere_after(
    site, http, bus, tmp_path
):
    """In events, objects, the server's own files, the page's state and the metrics."""
    reply = await ask(site, http, user="alice")
    await rate(http, "psk-test", reply["id"], user="alice")
    await ask(site, http, user="bob")
    alice, bob = await site.events(InferenceRecorded)
    ids = site.generator.asked[0].token_ids.data
    path = tmp_path / "objects" / "content-keys" / alice.tenant / alice.user
    key = path.read_bytes()
    assert ids in await opened(site) and SECRET_TEXT.encode() in await opened(site)
    assert key in await everything(site, tmp_path)

    erasure = await erase(bus, site.vault(), alice.tenant, alice.user, is_up=False)
    assert (erasure.num_requests, erasure.steps) == (1, [])
    left = await opened(site)
    assert SECRET_TEXT.encode() not in left, "the comment"
    assert left.count(ids) == 1, "bob asked the same and is still there"
    own = bearer("psk-operator")
    paths = ("/v1/monitor/state", "/metrics")
    views = [await (await http.get(path, headers=own)).read() for path in paths]
    found = b"\0".join([await everything(site, tmp_path), *views])
    for needle in (key, SECRET_TEXT.encode(), b"return a + b", b"alice", ids):
        assert needle not in found
    with pytest.raises(ErasedError):
        await site.turn(alice)
    assert (await site.turn(bob)).context_ids.data == ids
    await eventually(site, UserErased)
    await ask(site, http, user="alice")
    assert (await site.turn((await site.events(InferenceRecorded))[-1])).context_ids.data == ids


async def test_an_erased_user_s_responses_are_not_continued(site, http, bus):
    asked = {"model": "policy", "input": SECRET_TEXT, "user": "alice"}
    site.will_reply(site.chat.render_turn("a"))
    reply = await http.post("/v1/responses", json=asked, headers=bearer("psk-test"))
    name = (await reply.json())["id"]
    (alice,) = await site.events(InferenceRecorded)
    await erase(bus, site.vault(), alice.tenant, alice.user, is_up=False)
    await eventually(site, UserErased)
    again = asked | {"previous_response_id": name}
    async with asyncio.timeout(20.0):
        while True:
            site.will_reply(site.chat.render_turn("b"))
            reply = await http.post("/v1/responses", json=again, headers=bearer("psk-test"))
            if reply.status == 404:
                break
    assert (await reply.json())["error"]["code"] == "previous_response_not_found"


async def test_deleting_feedback_names_the_versions_that_keep_it(site, http):
    """D11: nothing is undone by it."""
    reply = await ask(site, http)
    await rate(http, "psk-test", reply["id"], feedback_id="f")
    (sample,) = await eventually(site, LiveSampleJoined)
    entry = SampleEntry(
        rollout_id=sample.sample_id,
        outcome=Outcome.SOLVED,
        reward=1.0,
        advantage=0.5,
        version_spans=[],
    )
    completed = StepCompleted(
        step=1, policy_version=1, weights_digest="", optimizer_digest="", metrics={}
    )
    manifest = BatchManifest(step=1, policy_version=0, groups=[], live=[entry])
    await site.bus.publish([manifest, completed])
    async with asyncio.timeout(20.0):
        while True:
            status = await http.get("/v1/feedback/f", headers=bearer("psk-test"))
            if (await status.json())["status"] == "trained":
                break
    deleted = await http.delete("/v1/feedback/f", headers=bearer("psk-test"))
    assert await deleted.json() == {"feedback_id": "f", "retracted": True, "versions": [1]}


@pytest.mark.parametrize("fields", [{}, {"store": False}])
async def test_a_gateway_that_does_not_know_a_request_finds_on_the_log_whose_it_is(
    site, http, fields
):
    reply = await ask(site, http, user="alice", **fields)
    for kind in (InferenceRecorded, InferenceCounted):
        await site.events(kind)
    services = site.gateway._services
    services.index = RequestIndex()
    await rate(http, "psk-test", reply["id"])
    (feedback,) = await site.events(FeedbackReceived)
    if fields:
        assert (feedback.user, feedback.content) == ("k-user", None)
    else:
        (record,) = await site.events(InferenceRecorded)
        assert record.user.startswith("u-")
        assert feedback.user == record.user
        assert feedback.content.owner == f"user/{record.user}"
    other = {"request_id": reply["id"], "name": "accept", "value": 1}
    services.index = RequestIndex()
    answer = await http.post("/v1/feedback", json=other, headers=bearer("psk-other"))
    assert (answer.status, (await answer.json())["error"]["code"]) == (403, "not_your_request")
