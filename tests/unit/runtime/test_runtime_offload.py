"""Blocking work: beside the event loop, counted as busy, and bounded."""

import threading

import pytest
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer

from penstock.actors.runtime import host_context
from penstock.actors.runtime.clock import SystemClock
from penstock.actors.runtime.host_context import ActorIdentity, HostContext
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.errors import DeadlineError


@pytest.fixture
async def ctx():
    clock, store = SystemClock(), MemoryStore()
    bus = MemoryBus(MemoryServer(seed=1, clock=clock), run_id="r", store=store, name="test")
    ctx = HostContext(
        ActorIdentity(name="a", seed=1, incarnation="i"), bus=bus, store=store, clock=clock
    )
    yield ctx
    await ctx.close()
    await bus.close()


async def test_work_runs_in_a_thread_of_its_own(ctx):
    assert await ctx.offload(threading.current_thread) is not threading.current_thread()
    assert ctx.meter.busy_s > 0


async def test_work_that_hangs_is_named(ctx, monkeypatch):
    monkeypatch.setattr(host_context, "OFFLOAD_S_MAX", 0.01)
    released = threading.Event()
    with pytest.raises(DeadlineError, match=r"a: Event\.wait was still running after 0\.01 s"):
        await ctx.offload(released.wait)
    released.set()


async def test_an_error_of_the_work_itself_is_its_own(ctx):
    def late() -> None:
        raise TimeoutError("of the work")

    with pytest.raises(TimeoutError, match="of the work"):
        await ctx.offload(late)
