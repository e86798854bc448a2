"""Replies while the log is away: kept on disk, recorded when it is back, also after a crash."""

import json
import signal
import stat
import subprocess
import sys

import aiohttp
import pytest
from tests.redteam.gateway.test_live_users import recorded

from penstock.gateway.exchange.spool import Spool
from penstock.messages.errors import QueueFullError
from penstock.messages.feedback import InferenceCounted, InferenceRecorded
from penstock.messages.rpc import Ack, RemoteError, RemoteErrorKind

from .conftest import Site, until

GOOD = {"model": "policy", "messages": [{"role": "user", "content": "Fix add."}]}
HEADERS = {"Authorization": "Bearer psk-test"}


class Outage:
    """Fails every publish of a record while it lasts."""

    def __init__(self, bus, monkeypatch) -> None:
        self.is_on = True
        self._publish = bus.publish
        monkeypatch.setattr(bus, "publish", self.publish)

    async def publish(self, events):
        if self.is_on and isinstance(events[0], InferenceRecorded | InferenceCounted):
            raise TimeoutError
        return await self._publish(events)


async def ask(http, stream=False, **fields):
    reply = await http.post("/v1/chat/completions", json=GOOD | {"stream": stream} | fields)
    text = await reply.text()
    assert reply.status == 200, text
    return text.split('"id":"')[1].split('"')[0]


async def test_replies_of_an_outage_are_recorded_once_it_is_over(
    bus, tmp_path, tokenizer, monkeypatch
):
    outage = Outage(bus, monkeypatch)
    first = Site(bus, tmp_path, tokenizer)
    ids = first.chat.render_turn("return a + b")
    async with first.running(), aiohttp.ClientSession(first.url, headers=HEADERS) as http:
        names = []
        for stream in (False, True):
            first.will_reply(ids)
            names.append(await ask(http, stream))
        first.will_reply(ids)
        names.append(await ask(http, store=False))
    assert await first.events(InferenceRecorded) == []
    files = sorted((tmp_path / "spool").iterdir())
    assert len(files) == 3
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert all(b"return" not in path.read_bytes() for path in files), "sealed"
    (tmp_path / "spool" / "0-broken.record").write_bytes(b"x")

    outage.is_on = False
    second = Site(bus, tmp_path, tokenizer)
    async with second.running(), aiohttp.ClientSession(second.url, headers=HEADERS) as http:
        await until(lambda: not list((tmp_path / "spool").glob("*.record")))
        second.will_reply(ids)
        names.append(await ask(http))
    recorded = [event.request_id for event in await second.events(InferenceRecorded)]
    counted = [event.request_id for event in await second.events(InferenceCounted)]
    assert recorded == [names[0], names[1], names[3]]
    assert counted == [names[2]]
    for record in await second.events(InferenceRecorded):
        assert (await second.turn(record)).token_ids.shape == (len(ids),)


async def test_a_full_disk_refuses_further_requests_and_leaves_no_reply_unrecorded(
    bus, tmp_path, tokenizer, monkeypatch
):
    Outage(bus, monkeypatch)
    site = Site(bus, tmp_path, tokenizer, spool_bytes_max=1)
    async with site.running(), aiohttp.ClientSession(site.url, headers=HEADERS) as http:
        site.will_reply(site.chat.render_turn("ok"))
        reply = await http.post("/v1/chat/completions", json=GOOD)
        assert (reply.status, (await reply.json())["error"]["code"]) == (503, "not_recorded")
        site.will_reply(site.chat.render_turn("ok"))
        reply = await http.post("/v1/chat/completions", json=GOOD | {"stream": True})
        text = await reply.text()
        assert '"code":"not_recorded"' in text
        assert "[DONE]" not in text


async def test_a_gateway_without_room_takes_no_request_on(bus, tmp_path, tokenizer, monkeypatch):
    Outage(bus, monkeypatch)
    site = Site(bus, tmp_path, tokenizer, spool_bytes_max=100)
    Spool(tmp_path / "spool", 1 << 20).put("x", recorded(site, "u-a"))
    async with site.running(), aiohttp.ClientSession(site.url, headers=HEADERS) as http:
        reply = await http.post("/v1/chat/completions", json=GOOD)
        assert (reply.status, (await reply.json())["error"]["code"]) == (503, "log_unavailable")


WRITER = """
import sys
from pathlib import Path
from penstock.gateway.exchange.spool import Spool
from penstock.messages.rpc import Ack
spool = Spool(Path(sys.argv[1]), 1 << 20)
for number in range(10_000):
    spool.put(f"r{number}", Ack())
    print(number, flush=True)
"""


def test_what_was_put_survives_kill_9(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with process:
        said = [json.loads(process.stdout.readline()) for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        said += [json.loads(line) for line in process.stdout if line.endswith("\n")]
    spool = Spool(tmp_path, 1 << 20)
    found = list(spool.waiting())
    assert {path.name.split("-")[1] for path, _ in found} >= {f"r{n}.record" for n in said}
    assert all(record == Ack() for _, record in found)
    for path, _ in found:
        spool.remove(path)
    assert spool.is_empty


def test_a_spool_has_a_bound(tmp_path):
    spool = Spool(tmp_path, 10)
    with pytest.raises(QueueFullError, match="at most 10 bytes"):
        spool.put("x", RemoteError(kind=RemoteErrorKind.FAILED, error="." * 99))
    assert spool.is_empty
