"""Over a hundred real kills of the launcher's processes: nobody is charged; then a crash is.

```
 test ─SIGKILL─▶ process with work in its note file ◀─starts, reads the notes, judges─ launcher
```
The launcher, its attribution, the note files, the actor host and the event server are the real
ones; the processes hold a light actor whose work never ends.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.contract.bus.bus_world import task

from penstock.actors.runtime.in_progress import NotedItem, read_in_progress
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.config.file import parse_config
from penstock.infra.config.settings import RunConfig
from penstock.infra.orphans import die_with_parent
from penstock.infra.run.charges import NEIGHBOR_S, RestartBudgetError
from penstock.infra.run.launcher import Processes, event_server
from penstock.infra.run.runs import RunDir
from penstock.messages.base import Event
from penstock.messages.control import ActorFailed, ItemCharged, ItemQuarantined

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NUM_KILLS = 120
NAMES = ("one", "two", "three", "four")
NUM_CONCURRENT = 2
WAIT_S = 60.0
WORKER = f"""
import asyncio, sys
from pathlib import Path
from penstock.actors.runtime.actor import Actor
from penstock.actors.runtime.host import ActorHost
from penstock.actors.runtime.in_progress import InProgress
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.task import StartRollout

class Worker(Actor):
    role = "worker"
    consumes = (StartRollout,)
    num_concurrent = {NUM_CONCURRENT}

    async def on_start_rollout(self, event, ctx):
        await ctx.sleep(1e6)
        return ()

async def main(name, url, noted):
    store = MemoryStore()
    bus = await NatsBus.connect(url, run_id="r1", store=store, name=name)
    host = ActorHost(Worker(), bus, store, name=name, seed=0, in_progress=InProgress(Path(noted)))
    await host.run(asyncio.Event())

asyncio.run(main(*sys.argv[1:]))
"""


class HoldingProcesses(Processes):
    """The launcher, over processes that hold their work for ever."""

    url = ""

    async def _start(self, name, specs):
        noted = self._in_progress_path(name)
        noted.unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WORKER, name, self.url, str(noted),
            stdin=asyncio.subprocess.DEVNULL, preexec_fn=die_with_parent, start_new_session=True,
        )  # fmt: skip
        self._running[name] = process
        return process

    async def until_busy(self, name: str) -> tuple[int, list[NotedItem]]:
        """Return the process's id and its work in progress, once it holds all that it takes."""
        async with asyncio.timeout(WAIT_S):
            while True:
                pid, items = self.pid(name), read_in_progress(self._in_progress_path(name))
                if pid and len(items) == NUM_CONCURRENT:
                    return pid, items
                await asyncio.sleep(0.02)


async def stored(bus: NatsBus, *types: type[Event]) -> list[Event]:
    return [delivery.event async for delivery in bus.follow(types, stop_at_end=True)]


class Killing:
    """Kills processes under their work, each time with new work behind it."""

    def __init__(self, processes: HoldingProcesses, bus: NatsBus) -> None:
        self._processes, self._bus = processes, bus
        self._next = itertools.count()
        self.num_kills = 0
        self.held: list[NotedItem] = []
        """What those killed had in progress."""

    async def kill(self, name: str, number: int = signal.SIGKILL) -> list[NotedItem]:
        """End one process that holds work, and wait until it is restarted."""
        await self._bus.publish([task(next(self._next)) for _ in range(NUM_CONCURRENT)])
        pid, items = await self._processes.until_busy(name)
        os.kill(pid, number)
        async with asyncio.timeout(WAIT_S):
            while self._processes.pid(name) in {pid, None}:
                await asyncio.sleep(0.02)
        return items

    async def kill_many(self, name: str) -> None:
        """Kill one process again and again, until all kills are done."""
        while self.num_kills < NUM_KILLS:
            self.num_kills += 1
            self.held.extend(await self.kill(name))


def make_config() -> RunConfig:
    tables = {
        "run": {"restarts_max": NUM_KILLS, "restart_period_s": 1e6},
        "regions": [{"name": "west", "serves": ["train", "eval", "live"]}],
        "processes": {name: ["rollout_worker"] for name in NAMES},
    }
    return parse_config(tables, "test")


async def test_kills_on_purpose_charge_nobody_and_use_the_restart_budget(tmp_path: Path) -> None:
    run, config = RunDir(tmp_path / "r1"), make_config()
    run.path.mkdir()
    async with event_server(run, config) as bus:
        processes = HoldingProcesses(run, config, NAMES)
        processes.url = run.read_state().url
        killing = Killing(processes, bus)
        watching = asyncio.create_task(processes.watch(bus))
        try:
            await asyncio.gather(*(killing.kill_many(name) for name in NAMES))
            assert killing.num_kills == NUM_KILLS
            assert len(killing.held) == NUM_CONCURRENT * NUM_KILLS
            assert await stored(bus, ItemCharged, ItemQuarantined) == []
            assert len(await stored(bus, ActorFailed)) == NUM_KILLS
            # A crash is charged, hence not to the budget, which the kills have used up.
            await asyncio.sleep(NEIGHBOR_S)
            items = await killing.kill("one", signal.SIGSEGV)
            charged = await stored(bus, ItemCharged)
            assert {event.item for event in charged} == {noted.item for noted in items}
            assert not watching.done()
            pid, _ = await processes.until_busy("two")
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(RestartBudgetError, match="used up its restarts"):
                    await watching
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError, RestartBudgetError):
                await watching
            await processes.stop()
