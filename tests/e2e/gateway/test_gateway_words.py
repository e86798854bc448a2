"""Words go in through every route and channel, are erased, and are nowhere any more."""

import contextlib
import gc
from array import array
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from tests.e2e.gateway.conftest import MASTER_KEY, SECRET, Site, until

from penstock.actors.feedback.actor import FeedbackJoiner
from penstock.actors.feedback.config import JoinConfig
from penstock.actors.runtime.vault import Vault
from penstock.infra.commands.log_file import export_log, import_log, log_types
from penstock.infra.privacy.command import erase_all
from penstock.infra.privacy.inventory import table
from penstock.infra.run.runs import RunDir
from penstock.infra.stores.directory import DirectoryStore
from penstock.messages.errors import ErasedError, PenstockError
from penstock.messages.feedback import FeedbackReceived, InferenceRecorded
from penstock.messages.reading.trajectories import open_live_turn

MARK = "zq7"
"""In every word that is planted, and nowhere else."""


def word(name: str) -> str:
    return f"{MARK}{name}{MARK}"


def is_data(one: object) -> bool:
    """Return whether an object is the gateway's data: code and the loop lead to this test, too."""
    kind = type(one)
    if kind.__module__.partition(".")[0] not in {"builtins", "collections", "array", "numpy"} | {
        "penstock"
    }:
        return False
    code = {"function", "builtin_function_or_method", "module", "type", "coroutine", "frame"}
    if kind.__name__ in code | {"method", "async_generator", "HostContext"}:
        return False
    return not (kind is dict and "__builtins__" in one)


def in_memory(root: object, tokenizer) -> set[str]:
    """Return the planted words in all that an object leads to, as text, bytes or token ids."""
    seen, waiting, found = set(), [root], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or not is_data(one):
            continue
        seen.add(id(one))
        if isinstance(one, array) or (isinstance(one, np.ndarray) and one.dtype == np.int32):
            one = tokenizer.decode(one.tolist())
        if isinstance(one, bytes | bytearray):
            one = bytes(one).decode("utf-8", "replace")
        if isinstance(one, str):
            if MARK in one:
                found.add(one[:200])
            continue
        if isinstance(one, list | tuple) and one and all(type(item) is int for item in one):
            text = tokenizer.decode(list(one))
            if MARK in text:
                found.add(text[:200])
        waiting += gc.get_referents(one)
    return found


def on_disk(folder: Path, tokenizer) -> set[str]:
    """Return the files that hold a planted word, as text or as int32 token ids."""
    ids = np.asarray(tokenizer.encode(MARK), "<i4").tobytes()
    return {
        str(path)
        for path in folder.rglob("*")
        if path.is_file()
        and (MARK.encode() in (data := path.read_bytes()) or ids in data or MARK in str(path))
    }


async def opened(site: Site, vault: Vault) -> set[str]:
    """Return what the log still gives to who has the master key."""
    found: set[str] = set()
    for record in await site.events(InferenceRecorded):
        with contextlib.suppress(ErasedError):
            read = (site.store, vault.open, record.turn, record.request_id)
            turn = await open_live_turn(*read)
            if MARK in site.tokenizer.decode(np.frombuffer(turn.context_ids.data, "<i4").tolist()):
                found.add(record.request_id)
    for event in await site.events(FeedbackReceived):
        with contextlib.suppress(ErasedError):
            found |= set(str(await vault.open(event.content, event.key())).split(MARK)[1::2])
    return found


def bodies() -> dict[str, dict[str, object]]:
    """Return a body of each route that answers, with a word wherever a client may write one."""
    message = {"role": "user", "content": word("prompt")}
    tool = {"name": word("tool"), "description": word("about"), "parameters": {"type": "object"}}
    function = {"type": "function", "function": tool}
    user, model = word("user"), {"model": "policy"}
    note = {"metadata": {"note": word("metadata")}}
    return {
        "/v1/chat/completions": model | note
        | {"messages": [message], "tools": [function], "user": user},
        "/v1/responses": model | note | {"input": word("input"), "user": user},
        "/v1/messages": model
        | {"messages": [message], "max_tokens": 8, "metadata": {"user_id": user}},
        "/v1/completions": model | {"prompt": word("text"), "user": user},
        "/v1/sessions": {
            "session_id": word("import"), "user": user,
            "messages": [message, {"role": "assistant", "content": word("reply")}],
        },
    }  # fmt: skip


@pytest.mark.parametrize("bus", ["nats"], indirect=True)
async def test_planted_words_are_found_before_an_erasure_and_nowhere_after(
    bus, tmp_path, tokenizer
):
    site = Site(bus, tmp_path, tokenizer)
    run, headers = RunDir(tmp_path / "host"), {"Authorization": f"Bearer {SECRET}"}
    headers |= {"X-Session-Id": word("session")}
    joiner = FeedbackJoiner(JoinConfig(reward_wait_s=0.0))
    async with site.running(joiner), aiohttp.ClientSession(headers=headers) as http:
        await until(lambda: site.gateway._services.policy_version >= 0)
        ids = []
        for number, (route, body) in enumerate(bodies().items()):
            site.will_reply(site.chat.render_turn(word("sampled")))
            retry = {"Idempotency-Key": word(f"retry{number}")}
            async with http.post(site.url + route, json=body, headers=retry) as reply:
                assert reply.status == 200, (route, await reply.text())
                told = await reply.json()
                ids.append(told.get("request_id") or told["id"])
            site.generator.replies.clear()
        texts = {name: word(name) for name in ("comment", "correction", "source", "occurred_at")}
        for request_id in ids:
            feedback = texts | {"request_id": request_id, "name": "accept", "value": 1}
            feedback |= {"feedback_id": f"{MARK}-{request_id}", "user": word("user")}
            async with http.post(f"{site.url}/v1/feedback", json=feedback) as reply:
                assert reply.status == 200, await reply.text()
        url = f"{site.url}/v1/feedback/{MARK}-{ids[0]}"
        async with http.patch(url, json={"comment": word("amended")}) as reply:
            assert reply.status == 200, await reply.text()
        records = await site.events(InferenceRecorded)
        (user,) = {record.user for record in records}

        kept = await opened(site, site.vault())
        assert {*ids} & kept and {"comment", "amended", "source"} <= kept, kept
        assert in_memory(site.gateway._services.planner.memory, tokenizer)
        await export_log(bus, site.store, tmp_path / "with-keys.zst", [
            await site.vault().take_out(owner) for owner in await site.vault().owners()
        ])  # fmt: skip
        assert not on_disk(tmp_path, tokenizer), "in no file in plain text, even before"

        await erase_all(run, bus, site.vault(), "user", user)
        await until(lambda: not in_memory(site.gateway._services, tokenizer))
        site.generator.asked.clear()
        assert not await opened(site, site.vault())
        with pytest.raises(PenstockError):
            await import_log(bus, site.store, tmp_path / "with-keys.zst", site.vault())
        await site.stop_gateway()
    assert not on_disk(tmp_path, tokenizer)

    again = Site(bus, tmp_path, tokenizer)
    async with again.running(FeedbackJoiner(JoinConfig(reward_wait_s=0.0))):
        await until(lambda: again.gateway._services.policy_version >= 0)
        assert not in_memory(again.gateway._services, tokenizer)
        assert not await opened(again, Vault(DirectoryStore(tmp_path / "objects"), MASTER_KEY))
    assert not on_disk(tmp_path, tokenizer)
    plain = [d.event async for d in bus.follow(log_types(), stop_at_end=True)]
    assert MARK not in str(plain)


def test_the_docs_have_the_inventory():
    text = (Path(__file__).parents[3] / "docs" / "live.md").read_text()
    assert table() in text
