"""The fleet of one round: a nats-server, a scheduler and two hosts, started again when killed."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path

from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.orphans import die_with_parent
from penstock.infra.run.runs import RunDir
from penstock.messages.telemetry import ActorReported

from .processes import children_of

CONFIG = """\
regions = [{ name = "west", serves = ["train", "eval", "live"] }]
processes = { scheduler = ["scheduler"], a = ["sandbox_host:a"], b = ["sandbox_host:b"] }
sandbox = { reports_to_scheduler = true, lease_s_max = 30.0 }
pool = { size = 2, live_max = 10 }
"""
IDLE_PER_HOST = 2
SCHEDULER, HOSTS = "scheduler", ("sandbox_host:a", "sandbox_host:b")
STOP_S_MAX = 30.0


class Part:
    """One process of the fleet; while `keep` runs it is started again whenever it ends."""

    def __init__(self, spec: str, run: RunDir, tmp: Path) -> None:
        self.spec = spec
        self.process: Process | None = None
        self._arguments = ["--run", str(run.path)]
        self._log = run.path / f"{spec}.log"
        self._environment = os.environ | {"TMPDIR": str(tmp)}

    @property
    def pid(self) -> int:
        """Of the newest process; 0 where none runs."""
        return self.process.pid if self.process and self.process.returncode is None else 0

    @property
    def name(self) -> str:
        """The actor's."""
        return self.spec.replace(":", "-")

    async def keep(self) -> None:
        """Run the process for as long as this is not cancelled."""
        while True:
            with self._log.open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "penstock.infra.cli", "actor", self.spec),
                    *self._arguments, stdout=log, stderr=log, env=self._environment,
                    preexec_fn=die_with_parent, start_new_session=True,
                )  # fmt: skip
            await self.process.wait()

    def kill(self) -> list[int]:
        """kill -9; return what it had below it."""
        if not self.pid:
            return []
        below = children_of(self.pid)
        self.process.send_signal(signal.SIGKILL)
        return [self.process.pid, *below]

    async def end(self) -> int:
        """Ask it to end; return its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_S_MAX):
            return await self.process.wait()


class Fleet:
    """The parts, and a bus to them."""

    def __init__(self, parts: list[Part], bus: NatsBus) -> None:
        self.scheduler, *self.hosts = parts
        self.parts = parts
        self.bus = bus

    async def gauges(self, part: Part, since: float) -> dict[str, float]:
        """What a part's actor reports, waited for: nothing that was reported before."""
        while True:
            report = await self.bus.last(ActorReported, part.name)
            if report is not None and report.event.at > since:
                return dict(report.event.gauges)
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def open_fleet(root: Path) -> AsyncIterator[Fleet]:
    """Start all of it below a folder; end all of it, in order, at the end."""
    run = RunDir(root / "fleet")
    tmp = root / "tmp"
    for folder in (run.path, tmp):
        folder.mkdir(parents=True)
    run.config.write_text(CONFIG)
    server = EmbeddedServer(store_dir=run.events)
    await server.start()
    bus = await NatsBus.connect(server.url, run_id=run.run_id, store=run.store(), name="boots")
    await bus.provision()
    run.write_state(server.url)
    parts = [Part(spec, run, tmp) for spec in (SCHEDULER, *HOSTS)]
    keeping = [asyncio.create_task(part.keep(), name=part.spec) for part in parts]
    codes: list[int] = []
    try:
        yield Fleet(parts, bus)
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        codes = await asyncio.gather(*(part.end() for part in parts))
        await bus.close()
        await server.stop()
    assert codes == [0] * len(parts), codes
