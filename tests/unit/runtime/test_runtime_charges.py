"""A handler that raises costs its event, not its actor; what cannot be left out ends the run."""

import asyncio
import contextlib
import signal
import subprocess
import sys

import pytest
from tests.contract.bus.bus_world import step, task
from tests.unit.runtime.test_runtime_host import Follower, Worker, simulated

from penstock.actors.runtime.event_dispatcher import FoldStuckError
from penstock.actors.runtime.in_progress import (
    NUM_SLOTS,
    UNNAMED,
    InProgress,
    NotedItem,
    read_in_progress,
    request_item,
)
from penstock.messages.control import (
    ActorFailed,
    ItemCharged,
    ItemQuarantined,
    MessageRejected,
)
from penstock.messages.rpc import Ack
from penstock.messages.sandbox import ExecCommand
from penstock.messages.training import StepCompleted


@simulated
async def test_work_whose_handler_raises_twice_is_set_aside_and_work_goes_on(world):
    tries = []

    async def handle(n, ctx):
        tries.append(n)
        if n == 1:
            raise RecursionError("too deep")
        return [step(n)]

    await world.bus.publish([task(1), task(2)])
    running = world.host(Worker(handle))
    await asyncio.sleep(1)
    world.stop.set()
    await running
    assert tries.count(1) == 2
    assert await world.log(StepCompleted) == [step(2)]
    (letter,) = await world.log(MessageRejected)
    assert (letter.cause, letter.is_charged) == ("RecursionError: too deep", True)
    (quarantined,) = await world.log(ItemQuarantined)
    assert quarantined.item == "worker.StartRollout.r1"
    assert quarantined.task_id == task(1).task.task_id
    assert await world.log(ActorFailed) == []
    assert world.server.logs["tasks"].messages() == []


@simulated
async def test_a_handler_that_raises_once_loses_nothing(world):
    tries = []

    async def handle(n, ctx):
        tries.append(n)
        if len(tries) == 1:
            raise MemoryError
        return [step(n)]

    await world.bus.publish([task(1)])
    running = world.host(Worker(handle))
    await asyncio.sleep(1)
    world.stop.set()
    await running
    assert await world.log(StepCompleted) == [step(1)]
    assert await world.log(MessageRejected, ItemQuarantined) == []


class Raises(Follower):
    """A fold that fails at one event."""

    async def on_step_completed(self, event, ctx):
        if event.step == 2:
            raise ZeroDivisionError("oh")
        return await super().on_step_completed(event, ctx)


@simulated
async def test_a_fold_that_can_skip_goes_on_after_the_event(world):
    await world.bus.publish([step(n) for n in range(4)])
    actor = Raises()
    running = world.host(actor)
    await asyncio.sleep(1)
    world.stop.set()
    await running
    assert actor.steps == [0, 1, 3]
    (letter,) = await world.log(MessageRejected)
    assert (letter.source_subject, letter.is_charged) == ("ps.r.training.StepCompleted.2", True)


class MustNotSkip(Raises):
    can_skip = False


@simulated
async def test_a_fold_that_cannot_skip_fails_once_and_then_for_good(world):
    await world.bus.publish([step(n) for n in range(4)])
    with pytest.raises(ZeroDivisionError):
        await world.host(MustNotSkip())
    (charged,) = await world.log(ItemCharged)
    assert (charged.number, charged.is_proven) == (1, True)
    with pytest.raises(FoldStuckError, match=r"StepCompleted\.2.*ZeroDivisionError: oh"):
        await world.host(MustNotSkip(), incarnation="i2")
    (quarantined,) = await world.log(ItemQuarantined)
    assert quarantined.item == f"{MustNotSkip.role}.StepCompleted.2"
    assert await world.log(MessageRejected) == []


@simulated
async def test_quarantined_work_is_refused_when_it_comes_again(world):
    running = 0

    async def handle(n, ctx):
        nonlocal running
        running += 1
        await asyncio.sleep(1e5)

    await world.bus.publish([task(1)])
    killed = world.host(Worker(handle))
    await asyncio.sleep(1)
    killed.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await killed
    await world.bus.publish([ItemQuarantined(item="worker.StartRollout.r1", cause="SIGSEGV")])
    successor = world.host(Worker(handle), incarnation="i2")
    await asyncio.sleep(60)
    world.stop.set()
    await successor
    assert running == 1
    (letter,) = await world.log(MessageRejected)
    assert (letter.cause, letter.is_charged) == ("quarantined: SIGSEGV", True)


class WideWorker(Worker):
    num_concurrent = 8


@simulated
async def test_suspects_are_worked_on_one_at_a_time_beside_the_others(world):
    at_once, most, both = set(), 0, False
    suspects = (1, 2, 3)

    async def handle(n, ctx):
        nonlocal most, both
        at_once.add(n)
        most = max(most, len(at_once.intersection(suspects)))
        both = both or len(at_once) > 1
        await asyncio.sleep(5.0)
        at_once.discard(n)
        return [step(n)]

    await world.bus.publish([task(n) for n in suspects])
    killed = world.host(WideWorker(handle))
    await asyncio.sleep(1)
    killed.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await killed
    charges = [
        ItemCharged(item=f"worker.StartRollout.r{n}", number=1, cause="died", is_proven=False)
        for n in suspects
    ]
    at_once.clear()
    most = 0
    await world.bus.publish([*charges, task(4), task(5)])
    successor = world.host(WideWorker(handle), incarnation="i2")
    await asyncio.sleep(200)
    world.stop.set()
    await successor
    assert {event.step for event in await world.log(StepCompleted)} == {1, 2, 3, 4, 5}
    assert (most, both) == (1, True)


def test_what_is_in_progress_outlives_a_killed_process(tmp_path):
    path = tmp_path / "run" / "worker"
    program = f"""
import os, pathlib
from penstock.actors.runtime.in_progress import InProgress
noted = InProgress(pathlib.Path({str(path)!r}))
with noted.noted("judge.RolloutFinished.g1-m0", "t1"):
    pass
with noted.noted("judge.RolloutFinished.g3-m2", "t3"), noted.noted("x.Y.1"):
    os.kill(os.getpid(), 9)
"""
    died = subprocess.run([sys.executable, "-c", program], check=False)
    assert died.returncode == -signal.SIGKILL
    assert sorted(read_in_progress(path), key=lambda one: one.item) == [
        NotedItem("judge.RolloutFinished.g3-m2", "t3"),
        NotedItem("x.Y.1"),
    ]
    assert InProgress(path).current() == [] == read_in_progress(path)
    assert read_in_progress(tmp_path / "none") == []


def test_more_than_there_is_room_for_is_noted_without_names():
    noted = InProgress()
    with contextlib.ExitStack() as stack:
        for number in range(NUM_SLOTS + 3):
            stack.enter_context(noted.noted(f"a.B.{number}"))
        with noted.noted("a.B." + "x" * 300):
            names = [one.item for one in noted.current()]
            assert len(names) == NUM_SLOTS + 1
            assert names.count(UNNAMED) == 1
    assert noted.current() == []


def test_hostile_names_of_requests_are_no_items():
    assert request_item(Ack()) == ""
    command = ExecCommand(lease_id="a b*", op_key="k", argv=[])
    assert request_item(command) == ""
