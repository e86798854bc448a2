"""What a host says of an actor that cannot serve."""

import asyncio

from tests.unit.runtime.test_runtime_host import simulated

from penstock.actors.runtime.actor import Actor
from penstock.actors.runtime.host import ActorHost


class Slow(Actor):
    """Starts and stops for a second each, and cannot serve until told."""

    role = "slow"
    waits_for = "no weights yet"

    def not_ready(self):
        return self.waits_for

    async def start(self, ctx):
        await ctx.sleep(1.0)
        return ()

    async def stop(self, ctx):
        await ctx.sleep(1.0)
        return ()


@simulated
async def test_an_actor_says_why_it_is_not_ready(world):
    actor = Slow()
    host = ActorHost(actor, world.connect("a"), world.store, name="a", seed=7, clock=world.clock)
    running = asyncio.create_task(host.run(world.stop))
    await asyncio.sleep(0.5)
    assert host.not_ready == "starting"
    await asyncio.sleep(1.0)
    assert host.not_ready == "no weights yet"
    actor.waits_for = ""
    assert host.not_ready == ""
    world.stop.set()
    await asyncio.sleep(0.5)
    assert host.not_ready == "stopping"
    await running
