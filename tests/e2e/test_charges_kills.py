"""A hundred real kills of launched processes: nobody is charged; then a crash under one item is."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.contract.bus.bus_world import task

from penstock.infra.run.config_file import parse_config
from penstock.infra.run.launcher import Processes, event_server
from penstock.infra.run.orphans import die_with_parent
from penstock.infra.run.runs import RunDir
from penstock.messages.control import ItemCharged, ItemQuarantined

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

NUM_KILLS = 100
NAMES = ("one", "two")
WORKER = """
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
    num_concurrent = 3

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


class WorkerProcesses(Processes):
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

    async def until_busy(self, name: str) -> int:
        """Return the process id once it has work in progress."""
        from penstock.actors.runtime.in_progress import read_in_progress

        async with asyncio.timeout(60):
            while not (self.pid(name) and read_in_progress(self._in_progress_path(name))):
                await asyncio.sleep(0.05)
        return self.pid(name)


async def test_kills_on_purpose_charge_nobody(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r1")
    run.path.mkdir()
    tables = {
        "run": {"restarts_max": 10_000},
        "regions": [{"name": "west", "serves": ["train", "eval", "live"]}],
        "processes": {name: ["rollout_worker"] for name in NAMES},
    }
    config = parse_config(tables, "test")
    async with event_server(run, config) as bus:
        processes = WorkerProcesses(run, config, NAMES)
        processes.url = run.read_state().url
        await bus.publish([task(n) for n in range(12)])
        watching = asyncio.create_task(processes.watch(bus))
        try:
            for kill in range(NUM_KILLS):
                pid = await processes.until_busy(NAMES[kill % 2])
                os.kill(pid, signal.SIGKILL)
                while processes.pid(NAMES[kill % 2]) == pid:
                    await asyncio.sleep(0.02)
            log = bus.follow([ItemCharged, ItemQuarantined], stop_at_end=True)
            assert [delivery.event async for delivery in log] == []
            pid = await processes.until_busy("one")
            await asyncio.sleep(3.0)  # no neighbor's death is near
            os.kill(pid, signal.SIGSEGV)
            async with asyncio.timeout(30):
                async for delivery in bus.follow([ItemCharged]):
                    assert not delivery.event.is_proven or "StartRollout" in delivery.event.item
                    break
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            await processes.stop()
