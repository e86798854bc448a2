"""Attacks by stored messages: each ends in a dead letter, and every reader goes on behind it.

The sender may publish what it likes; readers follow, consume, look up and ask, on the bus in memory
and on a real nats-server.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import nats
import pytest
from tests.contract.bus.bus_world import step, take, task
from tests.contract.bus.test_bus_memory import MemoryWorld
from tests.contract.bus.test_bus_nats import NatsWorld
from tests.support.memory_bus.log import Stored
from tests.support.memory_bus.server import Faults
from tests.support.virtual_clock import run_virtual

from penstock.infra.bus.claims import CLAIM_HEADER
from penstock.messages.base import Claim, Message, Stream
from penstock.messages.codec import MESSAGE_BYTES_MAX, decode, encode
from penstock.messages.control import MessageRejected
from penstock.messages.errors import (
    CodecError,
    NotFoundError,
    RemoteCallError,
    StoreUnreachableError,
)
from penstock.messages.generation import AbortGeneration
from penstock.messages.reading.claims import claim_key, digest_of, fetch
from penstock.messages.rollout import TurnSampled
from penstock.messages.rpc import Ack, RemoteError, RemoteErrorKind
from penstock.messages.task import StartRollout
from penstock.messages.training import StepCompleted


class Attacked(MemoryWorld):
    """The bus in memory, with stored claims."""

    def __init__(self) -> None:
        super().__init__(0, Faults())

    async def attack(self, subject: str, data: bytes, *, is_claim: bool) -> None:
        stream = Stream(subject.split(".")[2])
        message = Stored(
            sequence=0, subject=subject, data=data, is_claim=is_claim,
            stored_at=self.server.clock.now(), publish_id="attack",
        )  # fmt: skip
        self.server.logs[stream].store(message)
        self.server.notify()


class AttackedNats(NatsWorld):
    """A real server, and a client that publishes with headers of its own."""

    async def attack(self, subject: str, data: bytes, *, is_claim: bool) -> None:
        client = await nats.connect(self.server.url)
        headers = {CLAIM_HEADER: "1"} if is_claim else None
        await client.jetstream().publish(subject, data, headers=headers)
        await client.close()


def run_on(kind: str, folder, scenario) -> None:
    """Run a scenario in a world of a kind."""

    async def on_nats() -> None:
        world = AttackedNats(folder)
        await world.server.start()
        try:
            await scenario(world)
        finally:
            for bus in world.buses:
                await bus.close()
            await world.server.stop()

    if kind == "memory":
        run_virtual(scenario(Attacked()))
    else:
        asyncio.run(on_nats())


def forged(event: Message, **changes: Any) -> bytes:
    """Return an event's map with other values; bytes are put in as they are."""
    fields = msgspec.msgpack.decode(encode(event), type=dict[str, msgspec.Raw])
    new = {
        name: msgspec.Raw(value) if isinstance(value, bytes) else msgspec.Raw(_pack(value))
        for name, value in changes.items()
    }
    return _pack(fields | new)


_pack = msgspec.msgpack.encode
STEP = "StepCompleted.5"
TURN = "TurnSampled.r1.0"
ARRAY = ["int32", [0], b""]


def sampled(array=ARRAY, spans=(), **changes: Any) -> bytes:
    turn = {
        "type": "Turn", "context_ids": array, "token_ids": ARRAY, "behavior_logprobs": ARRAY,
        "version_spans": list(spans), "stop_reason": "stop",
    }  # fmt: skip
    fields = {
        "type": "TurnSampled", "rollout_id": "r1", "group_id": "g", "purpose": "train",
        "turn_index": 0, "turn": turn,
    }  # fmt: skip
    return _pack(fields | changes)


def verdict(**changes: Any) -> bytes:
    fields = {
        "type": "Verdict", "rollout_id": "r1", "group_id": "g", "group_index": 0,
        "purpose": "train", "judge": "j", "judge_version": "1", "outcome": "solved", "reward": 1.0,
    }  # fmt: skip
    return _pack(fields | changes)


ATTACKS = {
    "text that is not UTF-8": (STEP, forged(step(5), weights_digest=b"\xa2\xff\xfe"), "utf-8"),
    "lists in lists": (STEP, forged(step(5), extra=b"\x91" * 100_000), "recursion"),
    "maps in maps": (STEP, forged(step(5), extra=b"\x81\xa0" * 100_000), "recursion"),
    "four billion items": (STEP, forged(step(5), metrics=b"\xdf\xff\xff\xff\xff"), "truncated"),
    "four gigabytes of text": (STEP, forged(step(5), weights_digest=b"\xdb\xff\xff\xff\xff"), ""),
    "an array that its bytes do not fill": (TURN, sampled(["int32", [1 << 40], b"1234"]), "takes"),
    "an array of objects": (TURN, sampled(["object", [1], b"12345678"]), "Array.dtype"),
    "an array of a negative size": (TURN, sampled(["int8", [-1, -1], b"1"]), "shape|>= 0"),
    "a thousand dimensions": (TURN, sampled(["int8", [1] * 1000, b"1"]), "at most 8 sizes"),
    "a negative count": (
        TURN, sampled(spans=[{"policy_version": 0, "num_tokens": -1}]), "num_tokens"
    ),
    "a turn before the first": ("TurnSampled.r1.-1", sampled(turn_index=-1), "turn_index"),
    "a reward that is no number": ("Verdict.r1.j", verdict(reward=float("nan")), "reward"),
    "an infinite reward": ("Verdict.r1.j", verdict(reward=float("inf")), "reward"),
    "an unknown type": (STEP, forged(step(5), type="StepForged"), "StepForged"),
    "a request in an event's place": (STEP, encode(Ack()), "expected an event, got Ack"),
    "another step's place": (STEP, encode(step(6)), "expected an event of the subject"),
    "another type's place": ("Verdict.5.j", encode(step(5)), "expected an event of the subject"),
    "a key that is no subject": (
        "Verdict.r1.j", verdict(rollout_id="r1.*.>"), "Verdict.key: expected letters"
    ),
    "nothing at all": (STEP, b"", "truncated"),
}  # fmt: skip
STREAM_OF = {"StepCompleted": "training", "TurnSampled": "trajectories", "Verdict": "rewards"}


async def letters(bus, count: int) -> list[MessageRejected]:
    deliveries = await take(bus.follow([MessageRejected]), count)
    return [delivery.event for delivery in deliveries]


async def check_read(world, suffix: str, data: bytes, cause: str, *, is_claim=False) -> None:
    """Store an attack between two good events; a follower reads both, and one letter is left."""
    bus = await world.bus("reader")
    await bus.publish([step(1)])
    subject = f"ps.r1.{STREAM_OF[suffix.split('.', maxsplit=1)[0]]}.{suffix}"
    await world.attack(subject, data, is_claim=is_claim)
    await bus.publish([step(2)])
    kind = type(decode(encode(step(1))))
    followed = bus.follow([kind, TurnSampled, _verdict_type()], stop_at_end=True)
    assert [delivery.event async for delivery in followed] == [step(1), step(2)]
    [letter] = await letters(bus, 1)
    assert (letter.source_subject, letter.actor) == (subject, "reader")
    assert letter.source_sequence == (2 if suffix.startswith("Step") else 1)
    assert cause in letter.cause or any(one in letter.cause for one in cause.split("|"))
    assert len(letter.cause) < 1000
    assert (letter.claim is not None) or letter.data == data


def _verdict_type() -> type:
    return type(decode(verdict()))


@pytest.mark.parametrize("kind", ["memory", "nats"])
@pytest.mark.parametrize("name", ATTACKS)
def test_a_stored_message_ends_as_a_dead_letter(tmp_path, kind, name):
    suffix, data, cause = ATTACKS[name]
    run_on(kind, tmp_path, lambda world: check_read(world, suffix, data, cause))


GOOD = encode(step(5))
KEY = claim_key(1.0, "event-1")


def claimed(key: str = KEY, data: bytes = GOOD, **changes: Any) -> bytes:
    claim = Claim(object_key=key, num_bytes=len(data), blake3=digest_of(data))
    return _pack(msgspec.structs.replace(claim, **changes))


CLAIMS = {
    "no object of that name": ({}, claimed(), "not in"),
    "a path out of the store": ({}, claimed("claims/../../../etc/passwd"), "expected a key"),
    "another run's object": ({}, claimed("claims/../../r2/objects/claims/1-a"), "expected a key"),
    "an object of another owner": (
        {"tasks/hidden": GOOD},
        claimed("tasks/hidden"),
        "expected a key",
    ),
    "a key with a wildcard": ({}, claimed("claims/*"), "expected a key"),
    "other bytes": (
        {KEY: encode(step(6))},
        claimed(),
        "does not match the claimed size and digest",
    ),
    "more bytes": ({KEY: GOOD + b"\x00"}, claimed(), "does not match the claimed size and digest"),
    "another digest": (
        {KEY: GOOD},
        claimed(blake3="0" * 64),
        "does not match the claimed size and digest",
    ),
    "a size beyond any message": ({KEY: GOOD}, claimed(num_bytes=1 << 50), "at most"),
    "an undecodable object": ({KEY: b"\xc1"}, claimed(data=b"\xc1"), "undecodable"),
    "a claim that is none": ({}, b"\xc1", "claim of 1 bytes"),
}


@pytest.mark.parametrize("kind", ["memory", "nats"])
@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_that_is_not_good_ends_as_a_dead_letter(tmp_path, kind, name):
    objects, data, cause = CLAIMS[name]

    async def scenario(world) -> None:
        for key, value in objects.items():
            await world.store.put(key, value)
        await check_read(world, STEP, data, cause, is_claim=True)

    run_on(kind, tmp_path, scenario)


@pytest.mark.parametrize("kind", ["memory", "nats"])
def test_shared_work_goes_on_behind_a_hostile_command(tmp_path, kind):
    async def scenario(world) -> None:
        bus = await world.bus("worker")
        hostile = forged(task(1), rollout_id=b"\xa2\xff\xfe")
        await world.attack("ps.r1.tasks.StartRollout.r1", hostile, is_claim=False)
        await bus.publish([task(2)])
        [item] = await take(bus.consume("workers", [StartRollout], num_pending_max=1), 1)
        assert item.delivery.event == task(2)
        await item.ack()
        [letter] = await letters(bus, 1)
        assert (letter.source_stream, letter.data) == ("tasks", hostile)

    run_on(kind, tmp_path, scenario)


@pytest.mark.parametrize("kind", ["memory", "nats"])
def test_what_is_looked_up_by_key_is_never_a_hostile_message(tmp_path, kind):
    async def scenario(world) -> None:
        bus = await world.bus()
        for data in (b"\xc1", encode(step(6))):
            await world.attack(f"ps.r1.training.{STEP}", data, is_claim=False)
            assert await bus.last(StepCompleted, "5") is None
        await world.attack("ps.r1.training.StepCompleted.9", claimed("claims/.."), is_claim=True)
        assert await bus.last(StepCompleted, "9") is None

    run_on(kind, tmp_path, scenario)


async def _same(message: Message) -> AsyncIterator[Message]:
    yield message


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x91" * 100_000, forged(AbortGeneration(request_id="x"), request_id=1)]
)
def test_a_bad_request_gets_a_typed_error_and_the_service_goes_on(tmp_path, body):
    async def scenario(world) -> None:
        bus = await world.bus()
        await bus.serve("same", _same)
        client = await nats.connect(world.server.url)
        for headers in (None, {CLAIM_HEADER: "1"}):
            inbox = f"{client.new_inbox()}-first"
            replies = await client.subscribe(inbox)
            await client.publish("ps.r1.rpc.same", body, reply=inbox, headers=headers)
            reply = decode((await replies.next_msg(10.0)).data)
            assert isinstance(reply, RemoteError) and reply.kind is RemoteErrorKind.INVALID
        await client.close()
        good = AbortGeneration(request_id="x")
        assert await bus.request("same", good, deadline_s=10.0) == good

    run_on("nats", tmp_path, scenario)


def test_a_bad_reply_is_the_services_error(tmp_path):
    async def scenario(world) -> None:
        bus = await world.bus()
        client = await nats.connect(world.server.url)

        async def answer(message) -> None:
            await client.publish(message.reply, b"\xc1")

        await client.subscribe("ps.r1.rpc.same", cb=answer)
        await client.flush()
        with pytest.raises(RemoteCallError, match="failed: same: bad reply"):
            await bus.request("same", Ack(), deadline_s=10.0)
        await client.close()

    run_on("nats", tmp_path, scenario)


def test_a_reply_cannot_have_a_client_delete_an_events_object(tmp_path):
    async def scenario(world) -> None:
        bus = await world.bus()
        await world.store.put(KEY, GOOD)
        client = await nats.connect(world.server.url)

        async def answer(message) -> None:
            await client.publish(message.reply, claimed(), headers={CLAIM_HEADER: "1"})

        await client.subscribe("ps.r1.rpc.same", cb=answer)
        await client.flush()
        assert await bus.request("same", Ack(), deadline_s=10.0) == step(5)
        assert await world.store.exists(KEY)
        await client.close()

    run_on("nats", tmp_path, scenario)


class Away:
    """A store that answers nobody, for a while."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures

    async def get(self, key: str) -> bytes:
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise StoreUnreachableError("away")
        return GOOD


def test_a_store_that_is_away_says_nothing_of_the_object():
    claim = msgspec.msgpack.decode(claimed(), type=Claim)
    assert run_virtual(fetch(Away(3), claim)) == GOOD
    with pytest.raises(StoreUnreachableError):
        run_virtual(fetch(Away(10_000), claim))
    with pytest.raises(CodecError):
        run_virtual(fetch(Away(0), msgspec.structs.replace(claim, blake3="0" * 64)))


def test_an_oversized_message_is_refused_where_it_is_sent_and_where_it_is_read(tmp_path):
    large = AbortGeneration(request_id="x" * MESSAGE_BYTES_MAX)
    with pytest.raises(CodecError, match="at most 67108864 bytes"):
        decode(encode(large))

    async def scenario(world) -> None:
        bus = await world.bus()
        with pytest.raises(CodecError, match=r"AbortGeneration: .* a message has at most"):
            await bus.request("same", large, deadline_s=10.0)
        with pytest.raises(CodecError, match=r"StartRollout: .* a message has at most"):
            await bus.publish([task(1, large.request_id)])
        assert await world.store.keys("") == []

        async def too_much(message: Message) -> AsyncIterator[Message]:
            yield large

        await bus.serve("too.much", too_much)
        with pytest.raises(RemoteCallError, match="a message has at most"):
            await bus.request("too.much", Ack(), deadline_s=10.0)

    run_on("nats", tmp_path, scenario)


class Lagging:
    """A replica that sees an object a little later than its leader."""

    def __init__(self) -> None:
        self.num_reads = 0

    async def get(self, key: str) -> bytes:
        self.num_reads += 1
        if self.num_reads < 3:
            raise NotFoundError(key)
        return GOOD


def test_a_fresh_object_may_be_late_and_an_old_one_is_absent():
    fresh = msgspec.msgpack.decode(claimed(claim_key(time.time(), "event-1")), type=Claim)
    assert run_virtual(fetch(Lagging(), fresh)) == GOOD
    old = msgspec.structs.replace(fresh, object_key=KEY)
    with pytest.raises(CodecError):
        run_virtual(fetch(Lagging(), old))
