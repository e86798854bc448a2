"""Two gateways on one log: one set of limits, and replies that either gives again."""

import asyncio
import contextlib

import aiohttp
import msgspec
import pytest

from penstock.actors.runtime.host import ActorHost
from penstock.gateway.actor import Gateway
from penstock.gateway.config import GatewayConfig
from penstock.gateway.keys import KeySpec, hash_key
from penstock.infra.stores.directory import DirectoryStore
from penstock.messages.feedback import InferenceRecorded, UserErased
from penstock.messages.requests.gateways import LimitsChanged, ReplyKept
from penstock.messages.signals.defaults import DEFAULT_SIGNALS

from .conftest import ScriptedGenerator, Site, until

KEY = KeySpec(
    key_id="ann",
    key_hash=hash_key("psk-ann"),
    rpm_limit=6,
    max_parallel_requests=3,
    user_feedback_rpm_limit=4,
    storage_consent=True,
)
BODY = {"model": "policy", "messages": [{"role": "user", "content": "add"}]}


class Pair:
    """Two gateways and one generator."""

    def __init__(self, bus, folder, chat, key: KeySpec) -> None:
        self.bus, self.chat = bus, chat
        self.generator = ScriptedGenerator()
        self.urls: dict[str, str] = {}
        self.runs: dict[str, asyncio.Task[None]] = {}
        self.gateways: dict[str, Gateway] = {}
        self._store = DirectoryStore(folder / "objects")
        self._spool = folder / "spool"
        self._key = key
        config = GatewayConfig(port=0, retry_s=0.01, num_attempts_max=3, drain_s_max=0.1)
        self._config = msgspec.structs.replace(config, is_one_of_several=True)

    async def start(self, name: str) -> None:
        self.urls.pop(name, None)
        gateway = Gateway(
            self._config,
            self.chat,
            [self._key],
            secret=bytes(32),
            signals=DEFAULT_SIGNALS,
            spool=self._spool,
            on_listening=lambda url: self.urls.update({name: url}),
        )
        self.gateways[name] = gateway
        host = ActorHost(gateway, self.bus, self._store, name=f"gateway-{name}", seed=1)
        self.runs[name] = asyncio.create_task(host.run(asyncio.Event()))
        await until(lambda: name in self.urls)
        await until(lambda: gateway._services.replicas.ready("live"))

    async def kill(self, name: str) -> None:
        self.runs[name].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.runs[name]
        await self.gateways[name]._listener.stop()

    async def ask(self, name: str, path: str = "/v1/chat/completions", body=BODY, **headers):
        headers = {"Authorization": "Bearer psk-ann"} | headers
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.urls[name] + path, json=body, headers=headers) as answer,
        ):
            return answer.status, answer.headers.copy(), await answer.read()

    def will_reply(self, num: int) -> None:
        site = Site.will_reply
        for _ in range(num):
            site(self, self.chat.render_turn("return a"))


@pytest.fixture
async def pair(bus, tmp_path, tokenizer):
    site = Site(bus, tmp_path, tokenizer)
    found = Pair(bus, tmp_path, site.chat, KEY)
    host = ActorHost(found.generator, bus, found._store, name="generator", seed=1)
    generating = asyncio.create_task(host.run(asyncio.Event()))
    for name in ("a", "b"):
        await found.start(name)
    yield found
    for name in found.runs:
        await found.kill(name)
    generating.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await generating


async def test_a_minute_s_requests_are_those_of_both(pair):
    pair.will_reply(12)
    asked = [pair.ask(name) for name in ("a", "b") for _ in range(3)]
    first = await asyncio.gather(*asked[:3])
    second = await asyncio.gather(*asked[3:])
    assert [status for status, _, _ in [*first, *second]] == [200] * 6
    left = min(int(headers["x-ratelimit-remaining-requests"]) for _, headers, _ in second)
    assert left == 0
    for name in ("a", "b"):
        status, headers, _ = await pair.ask(name)
        assert status == 429 and "Retry-After" in headers


async def test_open_requests_are_those_of_both_and_of_a_killed_one_until_it_is_back(pair):
    pair.generator.gate.clear()
    pair.will_reply(8)
    open_ones = [asyncio.create_task(pair.ask("a")) for _ in range(2)]
    await until(lambda: len(pair.generator.asked) == 2)
    open_ones.append(asyncio.create_task(pair.ask("b")))
    await until(lambda: len(pair.generator.asked) == 3)
    for name in ("a", "b"):
        status, _, body = await pair.ask(name)
        assert status == 429 and b"too_many_parallel_requests" in body
    pair.generator.gate.set()
    assert [status for status, _, _ in await asyncio.gather(*open_ones)] == [200] * 3
    stored = await pair.bus.last(LimitsChanged, "ann")
    assert stored.event.open == {}


async def test_feedback_s_limits_are_those_of_both(pair):
    body = {"name": "thumbs", "value": 1, "request_id": "chatcmpl-x"}
    statuses = []
    for name in ("a", "b") * 3:
        status, _, _ = await pair.ask(name, "/v1/feedback", body)
        statuses.append(status)
    assert statuses == [200] * 4 + [429] * 2


async def test_either_gives_a_reply_again_and_no_token_is_sampled(pair):
    pair.will_reply(3)
    for stream in (False, True):
        body = BODY | {"stream": stream}
        again = {"Idempotency-Key": f"once-{stream}"}
        num_asked = len(pair.generator.asked)
        _, headers, reply = await pair.ask("a", body=body, **again)
        for name in ("b", "a"):
            status, found, replayed = await pair.ask(name, body=body, **again)
            assert (status, replayed) == (200, reply)
            assert found["x-request-id"] == headers["x-request-id"]
            assert found["x-penstock-replayed"] == "true"
            assert found["Content-Type"].split(";")[0] == headers["Content-Type"].split(";")[0]
        assert len(pair.generator.asked) == num_asked + 1
    records = [d async for d in pair.bus.follow([InferenceRecorded], stop_at_end=True)]
    assert len(records) == 2


async def test_one_that_waits_gets_the_reply_of_the_first(pair):
    pair.will_reply(1)
    pair.generator.gate.clear()
    again = {"Idempotency-Key": "once"}
    first = asyncio.create_task(pair.ask("a", **again))
    await until(lambda: pair.generator.asked)
    second = asyncio.create_task(pair.ask("b", **again))
    await asyncio.sleep(0)
    pair.generator.gate.set()
    (_, _, one), (_, headers, other) = await asyncio.gather(first, second)
    assert one == other and headers["x-penstock-replayed"] == "true"


async def test_a_killed_gateway_s_request_is_answered_by_the_other(pair):
    pair.will_reply(1)
    pair.generator.gate.clear()
    again = {"Idempotency-Key": "once"}
    first = asyncio.create_task(pair.ask("a", **again))
    await until(lambda: pair.generator.asked)
    await pair.kill("a")
    with contextlib.suppress(aiohttp.ClientError):
        await first
    pair.generator.gate.set()
    pair.will_reply(1)
    await pair.start("a")  # Its start says that what it had in progress is lost.
    status, headers, _ = await pair.ask("b", **again)
    assert status == 200 and "x-penstock-replayed" not in headers


async def test_a_key_stands_for_one_request_and_a_failed_one_frees_it(pair):
    pair.will_reply(2)
    again = {"Idempotency-Key": "once"}
    status, _, _ = await pair.ask("a", body=BODY | {"model": "other"}, **again)
    assert status == 404
    assert (await pair.ask("b", **again))[0] == 200
    status, _, body = await pair.ask("a", body=BODY | {"temperature": 0.5}, **again)
    assert status == 409 and b"idempotency_key_reused" in body
    status, _, body = await pair.ask("a", **{"Idempotency-Key": "x" * 300})
    assert status == 400 and b"1 to 256 characters" in body


async def test_what_is_not_to_be_stored_is_not_kept(pair):
    pair.will_reply(2)
    body = BODY | {"store": False}
    for name in ("a", "b"):
        status, headers, _ = await pair.ask(name, body=body, **{"Idempotency-Key": "once"})
        assert status == 200 and "x-penstock-replayed" not in headers
    kept = [d.event async for d in pair.bus.follow([ReplyKept], stop_at_end=True)]
    assert all(not one.reply for one in kept)


async def test_a_kept_reply_is_sealed_and_gone_with_its_user(pair):
    pair.will_reply(2)
    body, again = BODY | {"user": "alice"}, {"Idempotency-Key": "once"}
    _, _, reply = await pair.ask("a", body=body, **again)
    assert (await pair.ask("b", body=body, **again))[2] == reply
    [kept] = [d.event for d in [await pair.bus.last(ReplyKept)]]
    assert kept.reply is not None and b"return a" not in msgspec.msgpack.encode(kept)
    [record] = [d.event async for d in pair.bus.follow([InferenceRecorded], stop_at_end=True)]
    assert kept.reply.owner == f"{record.tenant}/{record.user}"
    vaults = [gateway._services.vault for gateway in pair.gateways.values()]
    await vaults[0].erase(kept.reply.owner)
    erased = UserErased(tenant=record.tenant, user=record.user, key_id=kept.reply.key_id)
    await pair.bus.publish([erased])
    await until(lambda: all(kept.reply.owner not in vault._keys for vault in vaults))
    status, headers, _ = await pair.ask("b", body=body, **again)
    assert status == 200 and "x-penstock-replayed" not in headers
    assert len(pair.generator.asked) == 2
