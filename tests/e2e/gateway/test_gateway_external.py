"""Finished sessions of other harnesses: stored sealed, labeled by their outcome, never more."""

import asyncio

import aiohttp
import pytest

from penstock.actors.feedback.actor import FeedbackJoiner
from penstock.actors.feedback.config import JoinConfig
from penstock.actors.monitor.actor import Monitor
from penstock.infra.export.preferences import PreferenceReader, standing
from penstock.kernels.arrays import from_array
from penstock.messages.feedback import FeedbackReceived, InferenceRecorded, LiveSampleJoined
from penstock.messages.reading.trajectories import last_of
from penstock.messages.rollout import EXTERNAL_VERSION
from penstock.messages.signals.preferences import Label, PreferencePair

from .conftest import Site, eventually

CALL = {"id": "c", "type": "function",
        "function": {"name": "read_file", "arguments": '{"path": "m.py"}'}}  # fmt: skip
MESSAGES = [
    {"role": "user", "content": "Fix add."},
    {"role": "assistant", "content": "look", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "def add(a, b): ..."},
    {"role": "assistant", "content": "return a + b"},
    {"role": "user", "content": "And run."},
    {"role": "assistant", "content": "finish"},
]
BODY = {"session_id": "mine", "messages": MESSAGES, "outcome": [{"name": "commit", "value": True}]}


def bearer(secret: str = "psk-test") -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.fixture
async def http(site):
    async with aiohttp.ClientSession(site.url) as session:
        yield session


async def post(http, secret: str = "psk-test", path: str = "/v1/sessions", **fields):
    reply = await http.post(path, json=BODY | fields, headers=bearer(secret))
    return reply.status, await reply.json()


async def test_a_session_is_one_record_one_sample_and_one_label(site, http):
    status, given = await post(http)
    assert (status, given["duplicate"]) == (200, False)
    [record] = await eventually(site, InferenceRecorded)
    assert (record.request_id, record.policy_version) == (given["request_id"], EXTERNAL_VERSION)
    assert record.is_external and record.training_consent
    turn = await site.turn(record)
    context, reply = from_array(turn.context_ids).tolist(), from_array(turn.token_ids).tolist()
    assert given["num_tokens"] == len(context) + len(reply)
    (first, second), decode = turn.forced, site.tokenizer.decode
    own = [reply[: first[0]], reply[first[1] : second[0]], reply[second[1] :]]
    assert own[1:] == [site.chat.render_turn(text) for text in ("return a + b", "finish")]
    assert site.chat.read_turn(own[0]).calls[0].arguments == {"path": "m.py"}
    assert "Fix add." in decode(context) and "def add(a, b)" in decode(reply[slice(*first)])
    assert turn.sampling is None, "nobody knows how it was drawn"
    [sample] = await eventually(site, LiveSampleJoined)
    assert (sample.request_ids, sample.reward) == ([given["request_id"]], 1.0)
    [label] = await eventually(site, Label)
    assert (label.is_desirable, label.name) == (True, "commit"), "of the session as a whole"
    fate = await http.get(f"/v1/feedback/{given['outcome'][0]['feedback_id']}", headers=bearer())
    assert (await fate.json())["status"] == "joined"


async def test_the_same_session_again_changes_nothing(site, http):
    first, second = [(await post(http))[1] for _ in range(2)]
    assert (second["request_id"], second["duplicate"]) == (first["request_id"], True)
    assert second["outcome"][0]["duplicate"]
    other = (await post(http, "psk-explorer"))[1]
    assert other["request_id"] != first["request_id"], "another tenant's session of that name"
    assert len(await site.events(InferenceRecorded)) == 2
    assert len(await site.events(FeedbackReceived)) == 2


async def test_of_a_session_that_was_sampled_here_only_the_outcome_counts(site, http):
    site.will_reply(site.chat.render_turn("return a + b"))
    body = {"model": "policy", "messages": MESSAGES[:1]}
    named = bearer() | {"X-Session-Id": "mine"}
    asked = await (await http.post("/v1/chat/completions", json=body, headers=named)).json()
    status, given = await post(http)
    assert (status, given["duplicate"], given["request_id"]) == (200, True, asked["id"])
    [record] = await site.events(InferenceRecorded)
    assert not record.is_external
    [sample] = await eventually(site, LiveSampleJoined)
    assert sample.reward == 1.0


async def test_what_may_not_be_stored_is_refused_and_what_may_not_be_trained_is_not(site, http):
    for secret, fields in (("psk-private", {}), ("psk-test", {"store": False})):
        status, error = await post(http, secret, **fields)
        assert (status, error["error"]["code"]) == (403, "no_consent")
    assert await site.events(InferenceRecorded) == await site.events(FeedbackReceived) == []
    _, given = await post(http, metadata={"training_consent": "false"})
    await eventually(site, InferenceRecorded)
    name = given["outcome"][0]["feedback_id"]
    async with asyncio.timeout(20):
        while True:
            fate = await (await http.get(f"/v1/feedback/{name}", headers=bearer())).json()
            if fate["status"] == "refused":
                break
            await asyncio.sleep(0.02)
    assert fate["reason"] == "no_consent"
    assert await site.events(Label) == await site.events(LiveSampleJoined) == []


WRONG = {
    "no session": ({"session_id": ""}, "session_id"),
    "no reply": ({"messages": MESSAGES[:3]}, "messages"),
    "no task": ({"messages": MESSAGES[1:]}, "messages[0]"),
    "no result": ({"messages": MESSAGES[:2] + MESSAGES[3:]}, "messages[1]"),
    "two turns in a row": ({"messages": MESSAGES[:4] + MESSAGES[5:]}, "messages[3]"),
    "a result of nothing": ({"messages": [*MESSAGES[:1], *MESSAGES[2:]]}, "messages"),
    "a system message later": (
        {"messages": [*MESSAGES[:4], {"role": "system", "content": "x"}, MESSAGES[5]]},
        "messages[3]",
    ),
    "another session's": ({"outcome": [BODY["outcome"][0] | {"request_id": "q"}]}, "outcome[0]"),
    "undeclared": ({"outcome": [{"name": "happy", "value": 1}]}, "name"),
    "no value": ({"outcome": [{"name": "commit"}]}, "value"),
    "twice": ({"outcome": BODY["outcome"] * 2}, "outcome[1].feedback_id"),
    "too many": ({"outcome": BODY["outcome"] * 33}, "outcome"),
    "unknown field": ({"reward": 1.0}, "reward"),
    "too many turns": (
        {"messages": [MESSAGES[0], *[MESSAGES[3], MESSAGES[4]] * 256, MESSAGES[5]]},
        "messages",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
async def test_what_is_no_session_is_refused_before_anything_is_stored(site, http, name):
    fields, param = WRONG[name]
    status, error = await post(http, **fields)
    assert (status, error["error"]["param"]) == (400, param), error
    assert await site.events(InferenceRecorded) == await site.events(FeedbackReceived) == []


async def test_a_session_longer_than_the_window_is_refused_and_charged(bus, tmp_path, tokenizer):
    site = Site(bus, tmp_path, tokenizer, context_tokens_max=256)
    async with site.running(Monitor()), aiohttp.ClientSession(site.url) as http:
        long = [*MESSAGES[:3], {"role": "assistant", "content": "x y " * 300}]
        for text in ("x y " * 200, "x y " * 20_000):
            long[3] = {"role": "assistant", "content": text}
            status, error = await post(http, messages=long)
            assert (status, error["error"]["code"]) == (400, "context_length_exceeded")
        reply = await http.post("/v1/sessions", json=BODY, headers=bearer())
        remaining = int(reply.headers["x-ratelimit-remaining-tokens"])
        assert remaining < int(reply.headers["x-ratelimit-limit-tokens"]) - 256


async def test_a_label_is_exported_with_all_its_turns_and_a_correction_is_no_pair(
    bus, tmp_path, tokenizer
):
    site = Site(bus, tmp_path, tokenizer)
    joiner = FeedbackJoiner(JoinConfig(reward_wait_s=0.0))
    correction = {"name": "correction", "correction": "no"}
    async with site.running(joiner), aiohttp.ClientSession(site.url) as http:
        await post(http, outcome=[correction, {"name": "commit", "value": False}])
        await eventually(site, Label)
        reader = PreferenceReader(site.store, site.vault(), last_of(bus), tokenizer, site.chat)
        [line] = [await reader.line(event) for event in await standing(bus)]
        assert await site.events(PreferencePair) == []
    assert [(m.role, m.content) for m in line["completion"]] == [
        (m["role"], m["content"]) for m in MESSAGES[1:]
    ]
    assert line["label"] is False and line["prompt"][-1].content == "Fix add."
