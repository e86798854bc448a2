"""The log over archive and stream is the log: on a real nats-server, killed at every step."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.contract.bus.test_bus_nats import NatsWorld
from tests.lab.age.aged_log import AgedLog

from penstock.actors.runtime.snapshots.stored import (
    SNAPSHOT_FORMAT,
    SnapshotHead,
    pack_state,
    store_snapshot,
)
from penstock.infra.bus.archive import archiver as archiving
from penstock.infra.bus.archive import reading
from penstock.infra.bus.archive.archiver import Archiver
from penstock.infra.bus.archive.segments import read_index, segment_keys
from penstock.infra.bus.collector import Collector
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.settings import ArchiveSection
from penstock.messages.base import Event, Stream
from penstock.messages.bus import Delivery
from penstock.messages.control import LogArchived
from penstock.messages.errors import CorruptDataError
from penstock.messages.feedback import FeedbackReceived, InferenceRecorded, LiveSampleJoined

TYPES = (InferenceRecorded, FeedbackReceived, LiveSampleJoined)
SETTINGS = ArchiveSection(events_max=200, age_s_min=0.0)


class Clock:
    """The archiver's time: it goes on when told."""

    at = 0.0

    def __call__(self) -> float:
        return self.at


class Log:
    def __init__(self, world: NatsWorld) -> None:
        self.world = world
        self.store = world.store
        self.clock = Clock()

    async def fill(self, num_requests: int = 500) -> NatsBus:
        """Publish a service's log, with some records in the store."""
        bus = await self.open("fill")
        await bus.publish([event for event, _ in AgedLog(num_requests, per_minute=2.0)])
        return bus

    async def open(self, name: str) -> NatsBus:
        bus = await NatsBus.connect(
            self.world.server.url, run_id="r1", store=self.store, name=name, inline_bytes=1000
        )
        await bus.provision()
        self.world.buses.append(bus)
        return bus

    def archiver(self, bus: NatsBus, settings: ArchiveSection = SETTINGS) -> Archiver:
        self.clock.at = max(self.clock.at, 4_000_000_000.0)
        return Archiver(bus, self.store, settings, self.clock)

    async def archive(self, bus: NatsBus, settings: ArchiveSection = SETTINGS) -> None:
        """Archive, wait, purge."""
        archiver = self.archiver(bus, settings)
        await archiver.look()
        self.clock.at += reading.PURGE_AFTER_S + 1.0
        await archiver.look()


@pytest.fixture
async def log(tmp_path: Path, monkeypatch) -> AsyncIterator[Log]:
    monkeypatch.setattr(archiving, "SEGMENT_EVENTS", 64)
    monkeypatch.setattr(reading, "LOOK_S", 0.0)
    world = NatsWorld(tmp_path)
    await world.server.start()
    yield Log(world)
    for bus in world.buses:
        await bus.close()
    await world.server.stop()


async def read(
    bus: NatsBus, types: tuple[type[Event], ...] = TYPES, after: dict[Stream, int] | None = None
) -> list[Delivery]:
    return [one async for one in bus.follow(types, after=after, stop_at_end=True)]


async def num_in(bus: NatsBus, stream: Stream) -> int:
    return int((await bus.stream_state(stream))[0]["messages"])


async def test_every_reader_reads_across_archive_and_stream(log: Log):
    bus = await log.fill()
    whole = await read(bus)
    before = await num_in(bus, Stream.FEEDBACK)
    await log.archive(bus)
    assert await num_in(bus, Stream.FEEDBACK) <= before // 2
    assert await read(bus) == whole
    places = [each for each in whole if each.stream is Stream.FEEDBACK]
    for place in (places[0], places[63], places[64], places[len(places) // 2], places[-1]):
        later = [each for each in places if each.sequence > place.sequence]
        types = (InferenceRecorded, LiveSampleJoined)
        assert await read(bus, types, {Stream.FEEDBACK: place.sequence}) == later
    for each in whole:
        assert await bus.last(type(each.event), each.event.key()) == each
    assert await bus.last(InferenceRecorded, "nobody") is None
    raw = [one async for one in bus.read_raw([Stream.FEEDBACK, Stream.SIGNALS])]
    known = {(each.stream, each.sequence): each.subject for each in whole}
    assert known.items() <= {(one.stream, one.sequence): one.subject for one in raw}.items()


async def test_a_reader_in_the_middle_misses_nothing_and_reads_nothing_twice(log: Log):
    bus = await log.fill()
    whole = await read(bus, (InferenceRecorded,))
    slow = bus.follow((InferenceRecorded,), stop_at_end=True)
    found = [await anext(slow) for _ in range(10)]
    await log.archive(bus)
    found += [one async for one in slow]
    assert found == whole
    live = bus.follow((InferenceRecorded,))
    assert [await anext(live) for _ in range(len(whole))] == whole
    await live.aclose()


@pytest.mark.parametrize("step", range(12))
async def test_an_archiver_killed_at_any_step_loses_nothing(log: Log, step: int, monkeypatch):
    """The store or the bus fails for good at the n-th write; the next archiver goes on."""
    bus = await log.fill(300)
    whole = await read(bus)
    num_left = step

    def dies(call):
        async def dying(*arguments, **named):
            nonlocal num_left
            num_left -= 1
            if num_left < 0:
                raise asyncio.CancelledError
            return await call(*arguments, **named)

        return dying

    with monkeypatch.context() as patch:
        patch.setattr(log.store, "put", dies(log.store.put))
        patch.setattr(bus, "publish", dies(bus.publish))
        patch.setattr(bus, "purge", dies(bus.purge))
        with pytest.raises(asyncio.CancelledError):
            for _ in range(9):
                await log.archive(bus)
    assert await read(bus) == whole
    await log.archive(bus)
    await log.archive(bus)
    other = await log.open("other")
    assert await read(other) == whole
    for stream in (Stream.FEEDBACK, Stream.SIGNALS):
        keys = await segment_keys(log.store, stream)
        assert all(a.last < b.first for a, b in itertools.pairwise(keys))
        logs = [key for key in await log.store.keys(f"archive/{stream}/") if key.endswith(".log")]
        assert len(logs) == len(keys)


async def test_what_a_restart_or_a_worker_needs_stays_in_its_stream(log: Log):
    bus = await log.fill()
    head = SnapshotHead(
        format=SNAPSHOT_FORMAT,
        fold="feedback",
        version=1,
        positions={Stream.FEEDBACK: 100, Stream.SIGNALS: 0},
        num_events=1,
    )
    await store_snapshot(log.store, "feedback", pack_state({}, head), 1)
    await log.archive(bus)
    assert (await segment_keys(log.store, Stream.FEEDBACK))[-1].last == 100
    assert not await segment_keys(log.store, Stream.SIGNALS)


async def test_objects_of_archived_events_stay_until_their_retention_ends(log: Log):
    bus = await log.fill()
    objects = await log.store.keys("claims/")
    assert objects
    await log.archive(bus)
    collector = Collector(bus, log.store)
    for _ in range(2):
        report = await collector.collect(now=5_000_000_000.0, grace_s=0.0)
        assert report.num_deleted == 0
    joined = [d.event.key() for d in await read(bus, (LiveSampleJoined,))]
    requests = len(await read(bus, (InferenceRecorded,)))
    await log.archive(bus, ArchiveSection(events_max=200, age_s_min=0.0, kept_s=1.0))
    assert [d.event.key() for d in await read(bus, (LiveSampleJoined,))] == joined
    assert len(await read(bus, (InferenceRecorded,))) < requests
    indexes = [
        await read_index(log.store, key) for key in await segment_keys(log.store, Stream.FEEDBACK)
    ]
    counted = sum(index.counts.get("InferenceRecorded", 0) for index in indexes)
    assert counted > 0 and all(index.is_reduced for index in indexes)
    report = await Collector(bus, log.store).collect(now=5_000_000_000.0, grace_s=0.0)
    assert report.num_deleted > 0


async def test_a_damaged_segment_is_named(log: Log):
    bus = await log.fill()
    await log.archive(bus)
    key = (await segment_keys(log.store, Stream.FEEDBACK))[1]
    data = await log.store.get(f"{key.path}.log")
    await log.store.delete(f"{key.path}.log")
    await log.store.put(f"{key.path}.log", data[:-3] + b"xyz")
    with pytest.raises(CorruptDataError, match=f"{key.path}.log"):
        await read(bus)


async def test_a_filling_stream_is_reported_before_it_is_full(log: Log, caplog, monkeypatch):
    bus = await log.fill()
    state, _ = await bus.stream_state(Stream.FEEDBACK)

    async def nearly_full(stream: Stream):
        found, bound = await NatsBus.stream_state(bus, stream)
        return found, int(state["bytes"] / 0.7) if stream is Stream.FEEDBACK else bound

    monkeypatch.setattr(bus, "stream_state", nearly_full)
    await log.archiver(bus, ArchiveSection(events_max=10**6, age_s_min=0.0)).look()
    assert "stream feedback holds 70% of its" in caplog.text
    found = await bus.last(LogArchived, "archive.feedback")
    assert found.event.last > 0, "archived at half"
