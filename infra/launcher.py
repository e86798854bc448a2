"""`penstock run`: starts a run's processes, watches them, and closes the run.

One embedded nats-server and one process per entry of `[processes]`; a process that dies is started
again within the restart budget. All state is on the log and in the object store, so a restart,
`--resume`, and a kill -9 of anything are the same thing to an actor.
"""

import asyncio
import contextlib
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path

from penstock.actors.runtime.supervisor import Decision, RestartPolicy
from penstock.infra.bus.nats_bus import NatsBus
from penstock.infra.config import RunConfig

from penstock.infra.bus.server import EmbeddedServer
from penstock.infra.runs import RunDir
from penstock.messages.control import ActorFailed
from penstock.messages.errors import PenstockError

STOP_S = 45.0
"""Longest orderly end of a process before it is killed."""


class RestartBudgetError(PenstockError, RuntimeError):
    """A process died more often than the restart budget allows; the text names its log."""


class Processes:
    """The run's actor processes, restarted as the policy says."""

    def __init__(self, run: RunDir, config: RunConfig, url: str) -> None:
        self._run = run
        self._config = config
        self._url = url
        self._policy = RestartPolicy(
            intensity=config.run.restarts_max, period_s=config.run.restart_period_s
        )
        self._running: dict[str, Process] = {}
        self._num_started: dict[str, int] = {}
        self._stopping = False

    def pid(self, name: str) -> int | None:
        """Return the process id of an entry of `[processes]` while it runs."""
        process = self._running.get(name)
        return process.pid if process and process.returncode is None else None

    async def watch(self, bus: NatsBus) -> None:
        """Start every process and restart the dead, until cancelled.

        Raises:
            RestartBudgetError: One died too often.

        """
        async with asyncio.TaskGroup() as group:
            for name, specs in self._config.processes.items():
                group.create_task(self._keep(name, specs, bus), name=f"keep {name}")

    async def stop(self) -> None:
        """Ask all to end in order, trainer first to save; kill what outlasts the deadline."""
        self._stopping = True
        running = [p for p in self._running.values() if p.returncode is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await asyncio.gather(*(p.wait() for p in running))
        except TimeoutError:
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.gather(*(p.wait() for p in running))

    async def _keep(self, name: str, specs: list[str], bus: NatsBus) -> None:
        while not self._stopping:
            process = await self._start(name, specs)
            code = await process.wait()
            if self._stopping:
                return
            num = self._num_started[name]
            failure = f"process {name} ended with code {code}; see {self._log_path(name)}"
            sys.stderr.write(f"[run] {failure}; starting it again\n")
            await bus.publish(
                [ActorFailed(actor=name, incarnation=f"p{num}", error=failure, num_restarts=num)]
            )
            if self._policy.on_failure(name, time.monotonic()) is Decision.ESCALATE:
                raise RestartBudgetError(f"{failure}; it has used up its restarts")
        return

    async def _start(self, name: str, specs: list[str]) -> Process:
        self._num_started[name] = self._num_started.get(name, 0) + 1
        path = self._log_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "penstock.infra.cli", "actor", *specs,
                "--run", str(self._run.path), "--nats", self._url,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=die_with_parent, start_new_session=True,
            )  # fmt: skip
        self._running[name] = process
        return process

    def _log_path(self, name: str) -> Path:
        return self._run.logs / f"{name}.log"


def die_with_parent() -> None:
    """Have the kernel kill this child when its launcher dies (prctl PR_SET_PDEATHSIG)."""
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


@contextlib.asynccontextmanager
async def event_server(run: RunDir, config: RunConfig) -> AsyncIterator[tuple[NatsBus, str]]:
    """Give a provisioned bus: on the cluster that `[bus] url` names, or an embedded server."""
    async with contextlib.AsyncExitStack() as stack:
        url = config.bus.url
        if not url:
            server = EmbeddedServer(store_dir=run.events, binary=config.bus.server_path or None)
            await server.start()
            stack.push_async_callback(server.stop)
            keeper = asyncio.create_task(_keep_server(server), name="keep nats-server")
            stack.callback(keeper.cancel)
            url = server.url
        bus = await NatsBus.connect(url, run_id=run.run_id, store=run.store(), name="launcher")
        stack.push_async_callback(bus.close)
        await bus.provision()
        run.write_state(url)
        yield bus, url


async def _keep_server(server: EmbeddedServer) -> None:
    """Start the server again, on its port and store, whenever it dies."""
    while True:
        await server.wait()
        sys.stderr.write("[run] nats-server died; starting it again\n")
        await server.start()
