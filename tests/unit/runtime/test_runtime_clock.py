"""Virtual time jumps, and the meter tells work from waits."""

import asyncio

import pytest
from tests.support.virtual_clock import SimulationStuckError, VirtualClock, run_virtual

from penstock.actors.runtime.meter import Meter


def test_hours_pass_at_once_and_in_order():
    async def main():
        clock = VirtualClock()
        order = []

        async def sleeper(duration_s):
            await asyncio.sleep(duration_s)
            order.append((duration_s, clock.monotonic()))

        await asyncio.gather(*(sleeper(s) for s in (7200.0, 0.5, 60.0)))
        return order, clock.now()

    order, now = run_virtual(main())
    assert order == [(0.5, 0.5), (60.0, 60.0), (7200.0, 7200.0)]
    assert now == VirtualClock.EPOCH + 7200.0


def test_timeouts_work_in_virtual_time():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.sleep(31)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 30.0


def test_a_deadlock_is_an_error():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(SimulationStuckError):
        run_virtual(main())


class ManualClock:
    uses_threads = False

    def __init__(self):
        self.time_s = 0.0

    def now(self):
        return self.time_s

    def monotonic(self):
        return self.time_s


async def test_the_meter_counts_steps_and_not_waits():
    clock = ManualClock()
    meter = Meter(clock)
    gate = asyncio.Event()

    async def works():
        clock.time_s += 2.0
        await gate.wait()
        clock.time_s += 3.0
        return "done"

    running = asyncio.create_task(meter.run(works()))
    await asyncio.sleep(0)
    clock.time_s += 100.0
    gate.set()
    assert await running == "done"
    assert meter.busy_s == 5.0


async def test_the_meter_lets_errors_and_cancellation_through():
    meter = Meter(ManualClock())
    cleaned = []

    async def waits():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(1)

    running = asyncio.create_task(meter.run(waits()))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cleaned == [1]

    async def fails():
        await asyncio.sleep(0)
        raise KeyError("x")

    with pytest.raises(KeyError):
        await meter.run(fails())
