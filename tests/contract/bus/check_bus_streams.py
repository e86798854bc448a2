"""Checks of events: stored once, in order, followed and read back."""

import asyncio

import msgspec
import pytest
from tests.contract.bus.bus_world import (
    Check,
    World,
    credits,
    saved,
    step,
    take,
    task,
)

from penstock.messages.base import Stream
from penstock.messages.bus import Bus
from penstock.messages.control import MessageRejected, RunFinished
from penstock.messages.errors import (
    ConfigError,
)
from penstock.messages.requests.gateways import LimitsChanged
from penstock.messages.reward import EvalRequested
from penstock.messages.task import CreditsChanged, StartRollout
from penstock.messages.training import CheckpointSaved, MidtrainCompleted, StepCompleted


async def publishing_a_key_twice_stores_it_once(world: World) -> None:
    bus = await world.bus()
    (first,) = await bus.publish([step(1, "first")])
    (second,) = await bus.publish([step(1, "second")])
    assert (first.is_duplicate, second.is_duplicate, second.sequence) == (False, True, 0)
    assert first.sequence > 0
    stored = await bus.last(StepCompleted, "1")
    assert stored is not None and stored.event == step(1, "first")


async def of_two_publishers_one_wins(world: World) -> None:
    buses = [await world.bus(name) for name in ("a", "b", "c")]
    receipts = await asyncio.gather(
        *(bus.publish([step(7, str(n))]) for n, bus in enumerate(buses))
    )
    winners = [n for n, (receipt,) in enumerate(receipts) if not receipt.is_duplicate]
    assert len(winners) == 1
    stored = await buses[0].last(StepCompleted, "7")
    assert stored is not None and stored.event == step(7, str(winners[0]))


async def a_batch_is_stored_in_order_and_skips_what_is_there(world: World) -> None:
    bus = await world.bus()
    await bus.publish([step(2)])
    receipts = await bus.publish([step(1), step(2), saved(1), step(3), step(3), task(1), task(1)])
    assert [receipt.is_duplicate for receipt in receipts] == [
        False, True, False, False, True, False, True,
    ]  # fmt: skip
    log = [d.event async for d in bus.follow([StepCompleted, CheckpointSaved], stop_at_end=True)]
    assert log == [step(2), step(1), saved(1), step(3)]


async def a_swap_takes_the_place_of_the_newest_alone(world: World) -> None:
    bus, other = await world.bus("a"), await world.bus("b")

    def left(level: float) -> LimitsChanged:
        return LimitsChanged(name="k", at=0.0, levels={"requests": level})

    first = await bus.swap(left(1.0), 0)
    assert not first.is_duplicate and first.sequence > 0
    assert (await other.swap(left(2.0), 0)).is_duplicate, "there is one by now"
    second = await other.swap(left(3.0), first.sequence)
    assert not second.is_duplicate
    assert (await bus.swap(left(4.0), first.sequence)).is_duplicate
    stored = await bus.last(LimitsChanged, "k")
    assert stored is not None
    assert (stored.event, stored.sequence) == (left(3.0), second.sequence)
    apart = msgspec.structs.replace(left(5.0), name="other")
    assert not (await bus.swap(apart, 0)).is_duplicate, "each subject by itself"


async def of_many_swaps_none_is_lost(world: World) -> None:
    buses = [await world.bus(name) for name in ("a", "b", "c")]

    async def add(bus: Bus) -> None:
        while True:
            found = await bus.last(LimitsChanged, "sum")
            level = 0.0
            if found is not None:
                assert isinstance(found.event, LimitsChanged)
                level = found.event.levels["n"]
            event = LimitsChanged(name="sum", at=0.0, levels={"n": level + 1})
            receipt = await bus.swap(event, found.sequence if found else 0)
            if not receipt.is_duplicate:
                return

    await asyncio.gather(*(add(bus) for bus in buses for _ in range(7)))
    stored = await buses[0].last(LimitsChanged, "sum")
    assert stored is not None and stored.event.levels == {"n": 21.0}


async def large_batches_keep_their_order(world: World) -> None:
    bus = await world.bus()
    events = [step(n) for n in range(1200)]
    receipts = await bus.publish(events)
    sequences = [receipt.sequence for receipt in receipts]
    assert sequences == sorted(set(sequences))
    assert [d.event async for d in bus.follow([StepCompleted], stop_at_end=True)] == events


async def the_latest_credits_win(world: World) -> None:
    bus = await world.bus()
    for n in range(5):
        await bus.publish([credits(n)])
    log = [d.event async for d in bus.follow([CreditsChanged], stop_at_end=True)]
    assert log == [credits(4)]


async def following_replays_and_goes_on_live(world: World) -> None:
    bus = await world.bus()
    receipts = await bus.publish([step(1), saved(1), step(2)])
    deliveries = bus.follow([StepCompleted])
    assert [d.event for d in await take(deliveries, 2)] == [step(1), step(2)]
    await bus.publish([saved(2), step(3)])
    (live,) = await take(deliveries, 1)
    assert live.event == step(3) and live.stream is Stream.TRAINING
    resumed = bus.follow([StepCompleted], after={Stream.TRAINING: receipts[1].sequence})
    assert [d.event for d in await take(resumed, 2)] == [step(2), step(3)]


async def reading_to_the_end_merges_streams_by_time(world: World) -> None:
    bus = await world.bus()
    types = [StepCompleted, RunFinished, EvalRequested]
    assert [d async for d in bus.follow(types, stop_at_end=True)] == []
    for n in range(4):
        await bus.publish([step(n)])
        await asyncio.sleep(0.001)
        await bus.publish([EvalRequested(eval_id=f"e{n}", policy_version=n, num_tasks=1)])
        await asyncio.sleep(0.001)
    await bus.publish([RunFinished(reason="done", step=4)])
    deliveries = [d async for d in bus.follow(types, stop_at_end=True)]
    names = [type(d.event).__name__ for d in deliveries]
    assert names == ["StepCompleted", "EvalRequested"] * 4 + ["RunFinished"]
    times = [d.stored_at for d in deliveries]
    assert times == sorted(times)


async def a_work_queue_is_not_followed(world: World) -> None:
    bus = await world.bus()
    with pytest.raises(ConfigError, match="StartRollout"):
        await anext(bus.follow([StepCompleted, StartRollout]))


async def the_last_event_is_found_by_type_and_key(world: World) -> None:
    bus = await world.bus()
    assert await bus.last(StepCompleted) is None
    await bus.publish([step(1), step(2), saved(9)])
    newest, one = await bus.last(StepCompleted), await bus.last(StepCompleted, "1")
    assert newest is not None and newest.event == step(2)
    assert one is not None and one.event == step(1) and one.sequence < newest.sequence
    assert await bus.last(StepCompleted, "9") is None
    assert await bus.last(MidtrainCompleted) is None


async def a_follower_skips_the_undecodable_and_says_so_once(world: World) -> None:
    bus = await world.bus("reader-1")
    await world.inject(
        Stream.TRAINING, "StepCompleted.1", b"\x82\xa4type\xadStepCompleted\xa4step\xa1x"
    )
    await bus.publish([step(2)])
    for _ in range(2):
        assert [d.event async for d in bus.follow([StepCompleted], stop_at_end=True)] == [step(2)]
    letters = [d.event async for d in bus.follow([MessageRejected], stop_at_end=True)]
    assert len(letters) == 1 and "$.step" in letters[0].cause


async def large_payloads_travel_by_claim_check(world: World) -> None:
    bus = await world.bus()
    big = task(1, "x" * 3_000_000)
    await bus.publish([big, task(2)])
    (item, small) = await take(bus.consume("workers", [StartRollout], num_pending_max=2), 2)
    assert item.delivery.event == big and small.delivery.event == task(2)
    stored = await bus.last(StartRollout, "r1")
    assert stored is not None and stored.event == big


CHECKS: list[Check] = [
    publishing_a_key_twice_stores_it_once,
    of_two_publishers_one_wins,
    a_batch_is_stored_in_order_and_skips_what_is_there,
    a_swap_takes_the_place_of_the_newest_alone,
    of_many_swaps_none_is_lost,
    large_batches_keep_their_order,
    the_latest_credits_win,
    following_replays_and_goes_on_live,
    reading_to_the_end_merges_streams_by_time,
    a_work_queue_is_not_followed,
    the_last_event_is_found_by_type_and_key,
    a_follower_skips_the_undecodable_and_says_so_once,
    large_payloads_travel_by_claim_check,
]
