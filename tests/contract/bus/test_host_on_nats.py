"""Actors on a real server that dies twice: nothing fails, nothing is lost or done twice."""

import asyncio

import pytest
from tests.contract.bus.bus_world import step, task
from tests.contract.bus.test_bus_nats import NatsWorld

from penstock.actors.runtime.actor import Actor
from penstock.actors.runtime.host import ActorHost
from penstock.messages.rpc import Ack
from penstock.messages.task import StartRollout
from penstock.messages.telemetry import ActorReported
from penstock.messages.training import StepCompleted

NUM_TASKS = 60
DEADLINE_S = 120.0


class Engine(Actor):
    role = "engine"

    def services(self):
        return {"generate": self.answer}

    async def answer(self, message):
        for _ in range(3):
            await asyncio.sleep(0.01)
            yield Ack()


class Worker(Actor):
    role = "worker"
    consumes = (StartRollout,)
    num_concurrent = 2

    async def on_start_rollout(self, event, ctx):
        replies = ctx.stream_request("generate", Ack(), idle_s=5.0)
        assert [reply async for reply in replies] == [Ack()] * 3
        return [step(int(event.rollout_id[1:]))]


class Reader(Actor):
    role = "reader"
    follows = (StepCompleted, ActorReported)

    def __init__(self):
        self.steps = []
        self.reports = []

    async def on_step_completed(self, event, ctx):
        self.steps.append(event.step)
        return ()

    async def on_actor_reported(self, event, ctx):
        self.reports.append((event.actor, event.at))
        return ()

    def has_heard(self, actors):
        """Whether each has reported, and more than once on average."""
        return {name for name, _ in self.reports} >= set(actors) and len(self.reports) >= 8


@pytest.fixture
async def world(tmp_path):
    world = NatsWorld(tmp_path)
    await world.server.start()
    yield world
    for bus in world.buses:
        await bus.close()
    await world.server.stop()


async def test_actors_outlive_the_server(world):
    stop = asyncio.Event()
    reader = Reader()
    actors = {"engine": Engine(), "worker-a": Worker(), "worker-b": Worker(), "reader": reader}
    running = []
    for name, actor in actors.items():
        host = ActorHost(actor, await world.bus(name), world.store, name=name, seed=1)
        running.append(asyncio.create_task(host.run(stop)))
    bus = await world.bus("test")
    await bus.publish([task(n) for n in range(NUM_TASKS)])
    for _ in range(2):
        await asyncio.sleep(0.25)
        await world.restart_server()
    await bus.publish([task(NUM_TASKS)])
    async with asyncio.timeout(DEADLINE_S):
        while len(reader.steps) < NUM_TASKS + 1 or not reader.has_heard(actors):
            await asyncio.sleep(0.05)
            for host in running:
                if host.done():
                    host.result()
    stop.set()
    await asyncio.gather(*running)
    assert sorted(reader.steps) == list(range(NUM_TASKS + 1))
    assert {name for name, _ in reader.reports} == set(actors)
