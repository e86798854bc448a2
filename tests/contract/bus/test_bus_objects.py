"""Large parts of events: stored once, read back, exported, and deleted when nothing names them."""

import base64
import json
import time

import msgspec
import nats
import pytest
from tests.contract.bus.bus_world import step, take, task
from tests.contract.bus.test_bus_nats import NatsWorld

from penstock.actors.runtime.vault import Vault
from penstock.infra.bus.claims import CLAIM_HEADER
from penstock.infra.bus.collector import GRACE_S, collect
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.commands.log_file import export_log, import_log
from penstock.infra.stores.directory import DirectoryStore
from penstock.infra.stores.jetstream import JetStreamStore
from penstock.messages.base import Array
from penstock.messages.control import MessageRejected, RunFinished
from penstock.messages.errors import CodecError, CorruptDataError
from penstock.messages.reading.claims import CLAIM_PREFIX
from penstock.messages.reading.rejected import read_rejected
from penstock.messages.reading.trajectories import last_of, read_trajectory
from penstock.messages.rollout import (
    EpisodeEnd,
    EpisodeFiles,
    RolloutFinished,
    StopReason,
    StoredTurn,
    Turn,
    TurnSampled,
    VersionSpan,
)
from penstock.messages.task import Purpose, StartRollout

INLINE_BYTES = 4096


@pytest.fixture
async def world(tmp_path):
    world = NatsWorld(tmp_path)
    await world.server.start()
    yield world
    for bus in world.buses:
        await bus.close()
    await world.server.stop()


async def connect(world: NatsWorld, run_id: str = "r1") -> NatsBus:
    bus = await NatsBus.connect(
        world.server.url, run_id=run_id, store=world.store, name="a", inline_bytes=INLINE_BYTES
    )
    await bus.provision()
    world.buses.append(bus)
    return bus


def turn(index: int, num_bytes: int) -> Turn:
    tokens = Array(dtype="int32", shape=(2,), data=bytes([index, 0, 0, 0] * 2))
    return Turn(
        context_ids=tokens,
        token_ids=tokens,
        behavior_logprobs=Array(dtype="float32", shape=(2,), data=bytes(8)),
        version_spans=[VersionSpan(policy_version=index, num_tokens=2)],
        stop_reason=StopReason.STOP,
        route_segments=[bytes([index]) * num_bytes],
    )


def sampled(turns: list[Turn]) -> list[TurnSampled]:
    return [
        TurnSampled(
            rollout_id="r", group_id="g", purpose=Purpose.TRAIN, turn_index=index, turn=turn
        )
        for index, turn in enumerate(turns)
    ]


def finished(turns: list[Turn], num_bytes: int) -> RolloutFinished:
    return RolloutFinished(
        rollout_id="r", group_id="g", group_index=0, group_size=1, member=0,
        purpose=Purpose.TRAIN, task_id="t", category="c", end=EpisodeEnd.FINISHED,
        turns=[turn.summary for turn in turns],
        files=EpisodeFiles(changed={"a.bin": bytes(num_bytes)}),
    )  # fmt: skip


async def purge(world: NatsWorld, stream: str) -> None:
    client = await nats.connect(world.server.url)
    reply = await client.request(f"$JS.API.STREAM.PURGE.PS_{stream}", b"")
    assert json.loads(reply.data)["success"]
    await client.close()


async def test_small_events_carry_all_they_have(world):
    bus = await connect(world)
    turns = [turn(0, 100)]
    await bus.publish([*sampled(turns), finished(turns, 100)])
    assert await world.store.keys("") == []
    end = (await bus.last(RolloutFinished)).event
    assert (await read_trajectory(world.store, last_of(bus), end)).turns == turns


async def test_each_turn_is_one_object_and_what_names_it_reads_it(world):
    bus = await connect(world)
    turns = [turn(0, 100), turn(1, 50_000), turn(2, 60_000)]
    await bus.publish(sampled(turns))
    await bus.publish([finished(turns, 80_000)])
    keys = await world.store.keys(CLAIM_PREFIX)
    assert len(keys) == 3
    events = [d.event async for d in bus.follow([TurnSampled, RolloutFinished], stop_at_end=True)]
    assert sorted(key for event in events for key in event.object_keys()) == keys
    assert [type(event.turn) for event in events[:3]] == [Turn, StoredTurn, StoredTurn]
    assert [event.turn.summary for event in events[:3]] == [each.summary for each in turns]
    read = await read_trajectory(world.store, last_of(bus), events[3])
    assert (read.turns, read.files) == (turns, {"a.bin": bytes(80_000)})


async def test_a_refused_event_leaves_no_object(world):
    bus = await connect(world)
    for _ in range(2):
        await bus.publish(sampled([turn(0, 50_000), turn(1, 50_000)]))
    assert len(await world.store.keys("")) == 2


async def test_a_call_leaves_no_object(world):
    bus = await connect(world)

    async def same(message):
        yield message

    await bus.serve("same", same)
    large = task(1, "x" * 2_000_000)
    assert await bus.request("same", large, deadline_s=20.0) == large
    assert [reply async for reply in bus.stream_request("same", large, idle_s=20.0)] == [large]
    assert await world.store.keys("") == []


@pytest.mark.parametrize("damage", ["gone", "other bytes", "another turn"])
async def test_an_object_that_is_not_the_turn_is_an_error_of_that_turn(world, damage):
    bus = await connect(world)
    turns = [turn(0, 50_000)]
    await bus.publish([*sampled(turns), finished(turns, 10)])
    [key] = await world.store.keys("")
    whole = await world.store.get(key)
    await world.store.delete(key)
    if damage == "other bytes":
        await world.store.put(key, whole[:-1] + b"\x07")
    end = (await bus.last(RolloutFinished)).event
    if damage == "another turn":
        await world.store.put(key, whole)
        end = msgspec.structs.replace(end, turns=[turn(1, 1).summary])
    with pytest.raises(
        CodecError, match=r"not in|does not match the claimed|does not match the expected summary"
    ):
        await read_trajectory(world.store, last_of(bus), end)


async def test_a_collection_keeps_what_is_named_and_deletes_the_rest(world):
    bus, other = await connect(world), await connect(world, "r2")
    turns = [turn(0, 50_000), turn(1, 50_000)]
    await bus.publish([*sampled(turns), finished(turns, 50_000), task(1, "x" * 2_000_000)])
    await world.store.put("tasks/train", b"another owner's")
    count = len(await world.store.keys(CLAIM_PREFIX))
    later = time.time() + 2 * GRACE_S
    assert (await collect(bus, world.store, now=later)).num_deleted == 0
    [item] = await take(bus.consume("workers", [StartRollout], num_pending_max=1), 1)
    assert len(await world.store.keys(CLAIM_PREFIX)) == count == 4
    await item.ack()
    await bus.flush()
    while await bus.last(StartRollout) is not None:  # The acknowledgement is on its way.
        continue
    done = await collect(bus, world.store, now=later)
    assert (done.num_deleted, done.num_kept) == (1, 3), "a done command's is gone"
    assert (await collect(other, world.store, now=time.time())).num_deleted == 0, "too young"
    await purge(world, "TRAJECTORIES")
    assert (await collect(bus, world.store, now=later)).num_deleted == 3
    assert await world.store.keys("") == ["tasks/train"]


async def test_a_dead_letter_keeps_its_object_and_can_be_read(world):
    bus, large = await connect(world), task(1, "x" * 2_000_000)
    await bus.publish([large])
    client = await nats.connect(world.server.url)
    stored = await client.jetstream().get_last_msg("PS_TASKS", "ps.r1.tasks.StartRollout.r1")
    await purge(world, "TASKS")
    subject = "ps.r1.tasks.StartRollout.r9"  # Not its own.
    await client.jetstream().publish(subject, stored.data, headers={CLAIM_HEADER: "1"})
    await client.close()
    await bus.publish([task(2)])
    await take(bus.consume("workers", [StartRollout], num_pending_max=1), 1)
    [delivery] = await take(bus.follow([MessageRejected]), 1)
    later = time.time() + 2 * GRACE_S
    assert (await collect(bus, world.store, now=later)).num_kept == 1
    assert await read_rejected(world.store, delivery.event, StartRollout) == large
    await purge(world, "DLQ")
    assert (await collect(bus, world.store, now=later)).num_kept == 0


async def test_an_exported_log_has_the_objects_that_its_events_name(world, tmp_path):
    bus = await connect(world)
    turns = [turn(0, 50_000), turn(1, 10)]
    await world.store.put(f"{CLAIM_PREFIX}1-orphan", b"named by nothing")
    await world.store.put("tasks/train", b"tasks")
    events = [*sampled(turns), finished(turns, 70_000), step(1), RunFinished(reason="x", step=1)]
    await bus.publish(events)
    file = tmp_path / "log"
    assert await export_log(bus, world.store, file) == len(events)
    store = DirectoryStore(tmp_path / "other")
    other = await NatsBus.connect(world.server.url, run_id="r2", store=store, name="b")
    world.buses.append(other)
    assert await import_log(other, store, file, Vault(store, bytes(32))) == len(events)
    keys = await store.keys("")
    assert "tasks/train" in keys and len(keys) == 3
    end = (await other.last(RolloutFinished)).event
    read = await read_trajectory(store, last_of(other), end)
    assert (read.turns, read.files) == (turns, {"a.bin": bytes(70_000)})


async def test_an_export_without_an_object_is_refused_by_name(world, tmp_path):
    bus = await connect(world)
    await bus.publish(sampled([turn(0, 50_000)]))
    [key] = await world.store.keys("")
    await world.store.delete(key)
    with pytest.raises(CorruptDataError, match=rf"TurnSampled\.r\.0: claim: object '{key}'"):
        await export_log(bus, world.store, tmp_path / "log")
    assert not (tmp_path / "log").exists()


async def test_a_small_object_s_bytes_leave_the_server_s_disk_with_it(world, tmp_path):
    """A content key that was erased must not be found in the server's files."""
    store = await JetStreamStore.connect(world.server.url, "keys")
    secret, other = b"wrapped-key-" * 12, b"another-key-" * 12
    await store.put("content-keys/t/u-1", secret)
    await store.put("content-keys/t/u-2", other)
    await store.delete("content-keys/t/u-1")
    assert await store.get("content-keys/t/u-2") == other
    await store.close()
    await world.server.stop()
    files = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert _is_in(files, other) and not _is_in(files, secret)
    await world.server.start()


def _is_in(files: bytes, needle: bytes) -> bool:
    """Whether bytes are in files, as they are or in the base64 of a description."""
    return needle in files or base64.b64encode(needle).rstrip(b"=")[:-2] in files
