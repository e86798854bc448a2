"""Processes killed on purpose by the hundred, among them items that crash theirs: who is charged?

Actors, bus, redelivery and the launcher's attribution are the real ones, on virtual time; a process
is an actor host that is dropped as SIGKILL or SIGSEGV would.
"""

import asyncio
import contextlib
import random
import signal

import pytest
from tests.contract.bus.bus_world import step, task
from tests.support.virtual_clock import run_virtual
from tests.unit.runtime.test_runtime_host import Worker, World

from penstock.actors.runtime.host import ActorHost
from penstock.actors.runtime.in_progress import InProgress
from penstock.infra.run.charges import NEIGHBOR_S, Attribution, Death, DeathCause, cause_of
from penstock.messages.control import ItemCharged, ItemQuarantined, MessageRejected
from penstock.messages.errors import BusClosedError
from penstock.messages.training import StepCompleted

NUM_PROCESSES = 4
NUM_TASKS = 30
"""At first; more follow, so that there is always work under the kills."""


class BusyWorker(Worker):
    num_concurrent = 3


class Launched:
    """A launcher over simulated processes."""

    def __init__(self, world: World, seed: int, poison: set[int]) -> None:
        self.world, self.random, self.poison = world, random.Random(seed), poison
        self.attribution = Attribution(crashes_max=10**6, period_s=1e9)
        self.ends: dict[int, asyncio.Future[int]] = {}
        self.in_progress: dict[int, InProgress] = {}
        self.num_tasks = NUM_TASKS
        self.num_kills = self.num_crashes = self.num_counted = 0

    async def keep(self, number: int) -> None:
        for start in range(100_000):
            in_progress = self.in_progress[number] = InProgress()
            end = self.ends[number] = asyncio.get_running_loop().create_future()
            actor, bus = BusyWorker(self.handler(number)), self.world.connect(f"p{number}")
            host = ActorHost(
                actor, bus, self.world.store, name=f"p{number}",
                seed=0, clock=self.world.clock, incarnation=f"i{start}", in_progress=in_progress,
            )  # fmt: skip
            running = asyncio.create_task(host.run(asyncio.Event()))
            code = await end
            items = tuple(in_progress.current())
            bus.crash()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, BusClosedError):
                await running
            await self.judge(number, code, items)
            await asyncio.sleep(1.0)

    async def judge(self, number: int, code: int, items: tuple) -> None:
        cause = cause_of(code, is_out_of_memory=False)
        at = asyncio.get_running_loop().time()
        death = Death(process=str(number), at=at, cause=cause, words=f"signal {-code}", items=items)
        self.attribution.note(death)
        if cause is DeathCause.CRASHED:
            await asyncio.sleep(NEIGHBOR_S)
        judgement = self.attribution.judge(death)
        self.num_counted += judgement.counts
        await self.world.bus.publish(judgement.events)

    def handler(self, number: int):
        async def handle(n, ctx):
            await asyncio.sleep(self.random.uniform(2.0, 40.0))
            if n in self.poison:
                self.num_crashes += 1
                self.end(number, -signal.SIGSEGV)
                await asyncio.sleep(1e6)
            return [step(n)]

        return handle

    def end(self, number: int, code: int) -> None:
        if not self.ends[number].done():
            self.ends[number].set_result(code)

    async def kill_at_random(self, count: int) -> None:
        while self.num_kills < count:
            await asyncio.sleep(self.random.expovariate(1 / 12.0))
            number = self.random.randrange(NUM_PROCESSES)
            if not self.ends[number].done() and self.in_progress[number].current():
                self.num_kills += 1
                self.end(number, -self.random.choice([signal.SIGKILL, signal.SIGTERM]))
            await self.world.bus.publish([task(self.num_tasks), task(self.num_tasks + 1)])
            self.num_tasks += 2


@pytest.mark.parametrize(
    ("seed", "poison", "num_kills"),
    [
        (0, set(), 60),
        (1, {25}, 30),
        (3, {20, 21}, 0),
        pytest.param(4, set(), 400, marks=pytest.mark.slow),
        pytest.param(2, {7, 8, 20}, 60, marks=pytest.mark.slow),
    ],
)
def test_kills_convict_nobody_and_crashes_their_cause(seed, poison, num_kills) -> None:
    async def scenario() -> None:
        world = World()
        launched = Launched(world, seed, poison)
        await world.bus.publish([task(n) for n in range(NUM_TASKS)])
        keeping = [asyncio.create_task(launched.keep(n)) for n in range(NUM_PROCESSES)]
        await asyncio.sleep(0.1)
        await launched.kill_at_random(num_kills)
        async with asyncio.timeout(3_000):
            while len(await world.log(StepCompleted)) < launched.num_tasks - len(poison):
                await asyncio.sleep(50)
            while len(await world.log(MessageRejected)) < len(poison):
                await asyncio.sleep(50)
        for one in keeping:
            one.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        culprits = {f"worker.StartRollout.r{n}" for n in poison}
        quarantined = {event.item for event in await world.log(ItemQuarantined)}
        assert quarantined == culprits
        letters = await world.log(MessageRejected)
        assert len(letters) == len(poison) and all(letter.is_charged for letter in letters)
        steps = {event.step for event in await world.log(StepCompleted)}
        assert steps == set(range(launched.num_tasks)) - poison
        charges = await world.log(ItemCharged)
        if len(poison) < 2:
            assert {event.item for event in charges if event.is_proven} == culprits
        if not poison:
            assert charges == []
        assert launched.num_kills == num_kills
        assert launched.num_crashes <= 4 * len(poison) + 2

    run_virtual(scenario())
