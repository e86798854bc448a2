"""kill -9 of a machine, of a host's process, of the scheduler's: at random, by the boots done."""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter

from .episodes import Episodes
from .fleet import Fleet
from .processes import left_of, machines_of

MACHINE_KILLS_EVERY = 5
HOST_KILLS_EVERY = 80
SCHEDULER_KILLS_EVERY = 80
"""Boots from one kill to the next, on average."""
LOOK_S = 0.01


class OrphanError(AssertionError):
    """Something outlived what it belongs to."""


class Chaos:
    """Kills until it is cancelled; after the kill of a host nothing below it may live on."""

    def __init__(self, fleet: Fleet, episodes: Episodes, rng: random.Random) -> None:
        self._fleet = fleet
        self._episodes = episodes
        self._rng = rng
        self.kills: Counter[str] = Counter()

    async def run(self) -> None:
        """Kill at random."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(MACHINE_KILLS_EVERY, self._kill_machine))
            group.create_task(self._repeat(HOST_KILLS_EVERY, self._kill_host))
            group.create_task(self._repeat(SCHEDULER_KILLS_EVERY, self._kill_scheduler))

    async def _repeat(self, every: int, kill) -> None:
        while True:
            after = self._episodes.num_boots + self._rng.randint(1, 2 * every)
            while self._episodes.num_boots < after:
                await asyncio.sleep(LOOK_S)
            await asyncio.sleep(self._rng.random() * 0.1)
            await kill()

    async def _kill_machine(self) -> None:
        machines = [pid for host in self._fleet.hosts for pid in machines_of(host.pid)]
        if machines:
            self.kills["machine"] += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._rng.choice(machines), signal.SIGKILL)

    async def _kill_host(self) -> None:
        below = self._rng.choice(self._fleet.hosts).kill()
        self.kills["host"] += bool(below)
        if left := await asyncio.to_thread(left_of, below):
            raise OrphanError(f"processes of a killed host live on: {left}")

    async def _kill_scheduler(self) -> None:
        self.kills["scheduler"] += bool(self._fleet.scheduler.kill())
