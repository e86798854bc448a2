"""Hosts on the simulated bus: a fold starts from its snapshot, catches up, then decides."""

import asyncio

import msgspec
import pytest
import xxhash
from tests.lab.age.aged_log import AgedLog
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer
from tests.support.virtual_clock import VirtualClock, run_virtual

from penstock.actors.feedback.actor import FeedbackJoiner
from penstock.actors.feedback.config import JoinConfig
from penstock.actors.runtime.host import ActorHost
from penstock.actors.runtime.snapshots import following
from penstock.actors.runtime.snapshots.stored import read_head, stored_snapshots
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.base import Event, Stream
from penstock.messages.feedback import (
    FeedbackLeftOut,
    FeedbackReceived,
    FeedbackRetracted,
    InferenceCounted,
    InferenceRecorded,
    LeftOutReason,
    LiveSampleJoined,
)

INPUTS = (InferenceRecorded, InferenceCounted, FeedbackReceived, FeedbackRetracted)
DAY_S = 86_400.0


class Service:
    """A log that users write, and a join that comes and goes."""

    def __init__(self, config: JoinConfig) -> None:
        self.config = config
        self.server = MemoryServer(seed=1, clock=VirtualClock())
        self.store = MemoryStore()
        self.bus = self._open()

    def _open(self) -> MemoryBus:
        return MemoryBus(self.server, run_id="r", store=self.store, name="p")

    async def write(self, events: list[tuple[Event, float]]) -> None:
        first_at, start = events[0][1], self.server.clock.now()
        for event, at in events:
            await asyncio.sleep(max(0.0, start + at - first_at - self.server.clock.now()))
            if isinstance(event, InferenceRecorded | InferenceCounted):
                now = self.server.clock.now()
                await self.bus.publish([msgspec.structs.replace(event, recorded_at=now)])
            else:
                await self.bus.publish([event])

    async def join(self, stop: asyncio.Event) -> None:
        bus = self._open()
        joiner = FeedbackJoiner(self.config)
        clock = self.server.clock
        host = ActorHost(
            joiner, bus, self.store, name="feedback", seed=1, clock=clock, report_s=1e9
        )
        await host.run(stop)
        await bus.close()

    async def run_join(self, seconds: float) -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(self.join(stop))
        await asyncio.sleep(seconds)
        stop.set()
        await running

    async def read(self, *types: type[Event]) -> list[Event]:
        return [d.event async for d in self.bus.follow(types, stop_at_end=True)]


def inputs(num_requests: int, seed: int = 0, per_minute: float = 2.0) -> list[tuple[Event, float]]:
    log = AgedLog(num_requests, seed=seed, per_minute=per_minute)
    return [(event, at) for event, at in log if isinstance(event, INPUTS)]


async def fates(service: Service) -> set[str]:
    """Return what is said of each piece of feedback: why it is left out, or that it counts."""
    events = await service.read(FeedbackLeftOut, LiveSampleJoined)
    left_out = {f"{e.reason} {e.key()}" for e in events if isinstance(e, FeedbackLeftOut)}
    # A later signal of a user takes the place of an earlier one: the newest revision tells.
    newest = {e.sample_id: e for e in events if isinstance(e, LiveSampleJoined)}
    return left_out | {f"joined {root}" for e in newest.values() for root in e.feedback_ids}


@pytest.mark.parametrize("seed", range(3))
def test_a_join_that_restarts_says_what_one_says_that_was_always_up(monkeypatch, seed: int):
    monkeypatch.setattr(following, "SAVE_EVENTS", 150)
    events = inputs(400, seed)
    config = JoinConfig(late_s_max=2 * DAY_S, signals=JoinConfig().signals[:5])

    async def always_up() -> set[str]:
        service = Service(config)
        stop = asyncio.Event()
        running = asyncio.create_task(service.join(stop))
        await service.write(events)
        await asyncio.sleep(3 * DAY_S)
        stop.set()
        await running
        return await fates(service)

    async def restarting() -> set[str]:
        service = Service(config)
        for start in range(0, len(events), 100):
            part = events[start : start + 100]
            if start % 300 == 0:  # Nobody joins meanwhile, for hours.
                await service.write(part)
                await service.run_join(30.0)
            else:
                stop = asyncio.Event()
                running = asyncio.create_task(service.join(stop))
                await service.write(part)
                stop.set()
                await running
        assert await stored_snapshots(service.store, "feedback")
        await service.run_join(3 * DAY_S)
        return await fates(service)

    assert run_virtual(restarting()) == run_virtual(always_up())


def test_a_join_that_comes_after_ten_days_leaves_out_nothing_that_was_joined():
    """Sessions are older than `late_s_max` by then, and signals come on a stream of their own."""
    events = inputs(300, per_minute=0.5)

    async def scenario() -> None:
        service = Service(JoinConfig())
        await service.write(events)
        await service.run_join(600.0)
        joined = {
            root for each in await service.read(LiveSampleJoined) for root in each.feedback_ids
        }
        assert len(joined) > 100
        await asyncio.sleep(30 * DAY_S)
        before = await fates(service)
        for key in await service.store.keys("snapshots/"):
            await service.store.delete(key)
        await service.run_join(600.0)
        new = [
            e for e in await service.read(FeedbackLeftOut) if f"{e.reason} {e.key()}" not in before
        ]
        assert not joined & {event.key() for event in new}
        assert {event.reason for event in new} <= {
            LeftOutReason.LATE,
            LeftOutReason.UNKNOWN_REQUEST,
        }

    run_virtual(scenario())


def test_a_damaged_or_newer_snapshot_falls_back_to_the_one_before(monkeypatch, caplog):
    monkeypatch.setattr(following, "SAVE_EVENTS", 100)
    caplog.set_level("INFO")

    async def scenario() -> None:
        service = Service(JoinConfig())
        events, store = inputs(500), service.store
        await service.write(events[:400])
        await service.run_join(120.0)
        await service.write(events[400:800])
        await service.run_join(120.0)
        newest, older, oldest = await stored_snapshots(store, "feedback")
        damaged = (await store.get(newest))[:-5] + b"xxxxx"
        newer = (await store.get(older)).replace(b"\xa6format\x01", b"\xa6format\x09")
        await store.delete(newest)
        await store.delete(older)
        await store.put(newest, damaged)
        await store.put(f"{older.rpartition('-')[0]}-{xxhash.xxh3_128_hexdigest(newer)}", newer)
        head, _ = read_head(await store.get(oldest), oldest)
        assert head.positions[Stream.FEEDBACK] > 0
        caplog.clear()
        await service.run_join(120.0)
        assert f"not starting from {newest}: " in caplog.text
        assert "expected format 1, got 9" in caplog.text
        assert f"starting from {oldest}" in caplog.text

    run_virtual(scenario())
