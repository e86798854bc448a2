"""`penstock channel`: what it moves to, and two that move at once."""

import asyncio

import pytest
from tests.sim.sync.world import World
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer

from penstock.actors.runtime.clock import SystemClock
from penstock.infra.commands.channel import last_move, move_channel
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.errors import NotFoundError, PublishConflictError


async def test_a_channel_moves_to_a_version_that_is_stored_and_only_one_mover_wins() -> None:
    world = World(lambda name: MemoryStore())
    await world.steps(3)
    server = MemoryServer(seed=0, clock=SystemClock())
    bus = MemoryBus(server, run_id="r", store=world.origin, name="test")
    with pytest.raises(NotFoundError, match=r"--version: .*holds \(0\.\.2\), got 7"):
        await move_channel(bus, world.origin, "stable", 7)
    assert await last_move(bus) is None
    await move_channel(bus, world.origin, "stable", 1)
    await move_channel(bus, world.origin, "candidate", 2)
    moved = await last_move(bus)
    assert moved is not None
    assert (moved.number, moved.channels) == (1, {"stable": 1, "candidate": 2})
    both = [move_channel(bus, world.origin, "stable", version) for version in (0, 2)]
    results = await asyncio.gather(*both, return_exceptions=True)
    assert sum(isinstance(result, PublishConflictError) for result in results) == 1
    await bus.close()
