"""Launcher: starts the processes of a run, watches them, and restarts those that die.

It runs one embedded nats-server and one process per entry of `[processes]`, and restarts a process
that dies as long as the restart budget allows. All state is in the log and in the object store, so
an actor cannot tell a restart from a `--resume` or a `kill -9`.
"""

import asyncio
import contextlib
import logging
import os
import sys
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection
from pathlib import Path

import msgspec

from penstock.actors.runtime.consumer import ACK_WAIT_S
from penstock.actors.runtime.files import open_private, private_folder, write_atomic
from penstock.actors.runtime.in_progress import read_in_progress
from penstock.actors.runtime.out_of_memory import OutOfMemoryWatch
from penstock.infra.bus.archive.archiver import ARCHIVE_S, Archiver, archive_if_possible
from penstock.infra.bus.collector import Collector, collect_if_possible
from penstock.infra.bus.jetstream.access import inbox_prefix
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.permissions import permissions
from penstock.infra.bus.server.kept import kept_server
from penstock.infra.bus.server.processor import record_processor
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.config.former_names import present_role
from penstock.infra.config.regions import RegionPlace
from penstock.infra.config.settings import RunConfig
from penstock.infra.models.environment import python_of
from penstock.infra.orphans import adopt_orphans, die_with_parent, end_orphans, reap_ended
from penstock.infra.output import write_to
from penstock.infra.ranks.environment import is_rank, rank_environments
from penstock.infra.ranks.units import first_to_end, stop_processes, units
from penstock.infra.run.charges import (
    CRASHES_PER_RESTART,
    NEIGHBOR_S,
    Attribution,
    Death,
    DeathCause,
    Judgement,
    RestartBudget,
    RestartBudgetError,
    RunStuckError,
    cause_of,
    describe_death,
)
from penstock.infra.run.liveness import LAUNCHER, answer, check_alone
from penstock.infra.run.roles import work_queues
from penstock.infra.run.runs import RunDir, check_space, connect
from penstock.infra.stores.settings import StoreKind
from penstock.messages.control import ActorFailed, ItemCharged
from penstock.messages.errors import (
    BusError,
    DeadlineError,
    PenstockError,
)
from penstock.messages.reading.asyncapi import document

log = logging.getLogger(__name__)
REAP_S = 1.0
SPACE_CHECK_S = 1.0
COLLECT_S = 3600.0
PAUSE_S = 30.0
"""Pause before a service restarts a process that has used up its restart budget."""


class Processes:
    """Actor processes of a run, restarted within the restart budget."""

    def __init__(
        self, run: RunDir, config: RunConfig, names: Collection[str], *, gives_up: bool = True
    ) -> None:
        """Prepare the processes without starting any.

        Args:
            names: Entries of `[processes]` that run on this host.
            gives_up: Whether a process that dies too often ends the run; otherwise it is
                restarted after a pause while the others continue.

        """
        self._gives_up = gives_up
        self._generator = config.generator
        self._run = run
        self._specs = {name: config.processes[name] for name in names}
        self._trainer = config.trainer
        self._settings = config.archive
        self._budget = RestartBudget(
            intensity=config.run.restarts_max, period_s=config.run.restart_period_s
        )
        self._running: dict[str, Process] = {}
        self._changing = asyncio.Lock()
        """Lock that keeps a process that is just starting from being mistaken for an orphan."""
        self._num_deaths: Counter[str] = Counter()
        self._memory = OutOfMemoryWatch()
        self._attribution = Attribution(
            crashes_max=CRASHES_PER_RESTART * max(1, config.run.restarts_max),
            period_s=config.run.restart_period_s,
        )
        self._stopping = False

    def pid(self, name: str) -> int | None:
        """Return the process id of an entry of `[processes]` while it runs."""
        process = self._running.get(name)
        return process.pid if process and process.returncode is None else None

    async def watch(self, bus: NatsBus) -> None:
        """Start every process and restart those that die, until cancelled.

        Raises:
            RestartBudgetError: A process died too often for no single known cause.
            RunStuckError: A process cannot get past an event.
            DiskFullError: The file system of the run is full; the log is left as it is.

        """
        adopt_orphans()
        # A launcher that starts again must remember earlier charges, or an item that crashes
        # workers would get its full allowance of crashes after every resume.
        charges = bus.follow([ItemCharged], stop_at_end=True)
        charged = [delivery.event async for delivery in charges]
        self._attribution.resume(event for event in charged if isinstance(event, ItemCharged))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch_space(), name="watch space")
                group.create_task(self._reap(), name="reap")
                group.create_task(self._collect(bus), name="collect")
                group.create_task(self._archive(bus), name="archive")
                for unit in units(self._specs):
                    group.create_task(self._keep(unit, bus), name=f"keep {', '.join(unit)}")
        except ExceptionGroup as failures:
            # The first failure cancels the other tasks, so it is the one that callers report.
            raise failures.exceptions[0] from None

    async def stop(self) -> None:
        """Stop all processes, ranks last; kill those that miss the deadline, and their orphans."""
        self._stopping = True
        ranks = {name for name, specs in self._specs.items() if is_rank(specs)}
        # Ranks stop last because the trainer needs them for its final save.
        for names in (set(self._running) - ranks, ranks):
            await stop_processes([p for name, p in self._running.items() if name in names])
        await self._end_orphans()

    async def _keep(self, unit: dict[str, list[str]], bus: NatsBus) -> None:
        while not self._stopping:
            environments = rank_environments(unit, self._trainer)
            # Under the lock: the reaper must not see a child that is not in `_running` yet.
            async with self._changing:
                processes = {
                    name: await self._start(name, specs, environments[name])
                    for name, specs in unit.items()
                }
            name = await first_to_end(processes)
            process = processes[name]
            code = process.returncode
            assert code is not None
            if self._stopping:
                return
            # Children of the dead process may still run; end them before its successor starts.
            await self._end_orphans()
            # A full disk ends the run as such, not as a process that died too often.
            check_space(self._run.path)
            self._num_deaths[name] += 1
            death, judgement = await self._judge(name, code, bus)
            failure = self._failure(death, judgement)
            if failure is not None and self._gives_up:
                raise failure
            pause = "" if failure is None else f" in {PAUSE_S:g} s"
            write_to(sys.stderr, f"[run] {death.words}; restarting it{pause}\n")
            log.debug(
                "process %s (pid %d) ended with code %d, cause %s, death %d",
                *(name, process.pid, code, death.cause.name, self._num_deaths[name]),
            )
            await self._publish_death(bus, name, process.pid, death.words)
            if failure is not None:
                await asyncio.sleep(PAUSE_S)

    def _failure(self, death: Death, judgement: Judgement) -> PenstockError | None:
        if death.cause is DeathCause.STUCK:
            return RunStuckError(death.words)
        if judgement.counts and not self._budget.allows_restart(time.monotonic()):
            return RestartBudgetError(f"{death.words}; it has used up its restarts")
        return None

    async def _judge(self, name: str, code: int, bus: NatsBus) -> tuple[Death, Judgement]:
        """Describe a death, publish the charges that follow from it, and return both."""
        cause = cause_of(code, is_out_of_memory=self._memory.has_risen())
        death = Death(
            process=name,
            at=time.monotonic(),
            cause=cause,
            words=describe_death(name, code, cause, self._log_path(name)),
            items=tuple(read_in_progress(self._in_progress_path(name))),
        )
        self._attribution.note(death)
        # One fault often kills several processes; wait for the neighbors' deaths before judging.
        if cause is DeathCause.CRASHED:
            await asyncio.sleep(NEIGHBOR_S)
        judgement = self._attribution.judge(death)
        with contextlib.suppress(BusError, DeadlineError):
            await bus.publish(judgement.events)
        return death, judgement

    async def _publish_death(self, bus: NatsBus, name: str, pid: int, failure: str) -> None:
        """Publish a death if the server is up; no actor depends on the event."""
        event = ActorFailed(
            actor=name,
            incarnation=f"{int(time.time()):x}-{pid:x}",
            error=failure,
            num_restarts=self._num_deaths[name],
        )
        with contextlib.suppress(BusError, DeadlineError):
            await bus.publish([event])

    async def _start(self, name: str, specs: list[str], environment: dict[str, str]) -> Process:
        path = self._log_path(name)
        private_folder(path.parent)
        noted = self._in_progress_path(name)
        # Items noted by the previous process must not be charged for the death of this one.
        noted.unlink(missing_ok=True)
        with open_private(path, "ab") as log_file:
            process = await asyncio.create_subprocess_exec(
                *self._command_prefix(specs), python_of(self._generator, specs),
                "-m", "penstock.infra.cli",
                "actor", *specs, "--run", str(self._run.path), "--in-progress", str(noted),
                stdin=asyncio.subprocess.DEVNULL, stdout=log_file, stderr=log_file,
                env=os.environ | environment,
                preexec_fn=die_with_parent, start_new_session=True,
            )  # fmt: skip
        self._running[name] = process
        log.info("process %s started as pid %d, logging to %s", name, process.pid, path)
        return process

    def _command_prefix(self, specs: list[str]) -> list[str]:
        state = self._run.read_state()
        return state.place(specs).entrance if state else []

    async def _end_orphans(self) -> None:
        async with self._changing:
            own = {process.pid for process in self._running.values()}
            await asyncio.to_thread(end_orphans, own)

    async def _reap(self) -> None:
        while True:
            async with self._changing:
                own = {process.pid for process in self._running.values()}
                await asyncio.to_thread(reap_ended, own)
            self._memory.sample()
            await asyncio.sleep(REAP_S)

    def _in_progress_path(self, name: str) -> Path:
        return self._run.in_progress / name

    async def _watch_space(self) -> None:
        while True:
            check_space(self._run.path)
            await asyncio.sleep(SPACE_CHECK_S)

    async def _collect(self, bus: NatsBus) -> None:
        """Delete objects that no event references, once an hour."""
        collector = Collector(bus, self._run.store())
        while True:
            await asyncio.sleep(COLLECT_S)
            await collect_if_possible(collector)

    async def _archive(self, bus: NatsBus) -> None:
        """Move the older part of the log to the store as streams fill."""
        archiver = Archiver(bus, self._run.store(), self._settings)
        while True:
            await asyncio.sleep(ARCHIVE_S)
            await archive_if_possible(archiver)

    def _log_path(self, name: str) -> Path:
        return self._run.logs / f"{name}.log"


@contextlib.asynccontextmanager
async def own_server(
    run: RunDir, config: RunConfig
) -> AsyncGenerator[tuple[EmbeddedServer, dict[str, RegionPlace]]]:
    """Yield an embedded server for the run, with an identity for each process."""
    is_in_server = config.store.kind is StoreKind.JETSTREAM
    buckets = [config.store.bucket or run.run_id] if is_in_server else []
    identities = {
        name: permissions(
            {present_role(spec).partition(":")[0] for spec in specs},
            run.run_id,
            inbox_prefix(name),
            buckets,
        )
        for name, specs in config.processes.items()
    }
    program = config.bus.server_path or None
    async with kept_server(run.events, program, identities=identities) as server:
        for name in identities:
            private_folder(run.identities)
            write_atomic(run.identities / name, server.credentials(name).encode(), mode=0o600)
        yield server, {}


OpenServer = Callable[
    [RunDir, RunConfig],
    contextlib.AbstractAsyncContextManager[tuple[EmbeddedServer, dict[str, RegionPlace]]],
]
"""Function that opens the embedded server and says how each region reaches it.

A caller that puts regions behind separate networks passes its own function, which yields one
`RegionPlace` per region: a process whose roles all belong to that region is started through the
`entrance` of the place and connects to its `url` (`tests/lab/regions/command.py` does so).
"""


@contextlib.asynccontextmanager
async def event_server(
    run: RunDir,
    config: RunConfig,
    *,
    is_service: bool = False,
    open_server: OpenServer = own_server,
) -> AsyncGenerator[NatsBus]:
    """Yield a provisioned bus on the servers of `[bus]`, or else on an embedded server."""
    server_pid: Callable[[], int] = int
    write_atomic(run.asyncapi, msgspec.json.encode(document()))
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(run.end_state)
        if access := run.access():
            # No client can ask a server for it: its account does not see the configuration.
            log.warning(
                "%s: with NATS's defaults, a power cut loses what they acknowledged within the "
                "last two minutes: expected `sync_interval: always` in their jetstream block%s",
                access.place,
                "" if access.section.num_replicas > 1 else ", or bus.num_replicas above 1",
            )
            bus = await stack.enter_async_context(connect(run, access, "launcher"))
            # Ask before answering: this launcher would otherwise hear its own answer.
            await check_alone(bus)
            await bus.serve(LAUNCHER, answer)
            await bus.provision()
            for durable, types in work_queues(config).items():
                await bus.provision_work(durable, types, ack_wait_s=ACK_WAIT_S)
            run.write_state("", is_service=is_service)
        else:
            server, places = await stack.enter_async_context(open_server(run, config))
            bus = await stack.enter_async_context(connect(run, server.url, "launcher"))
            await bus.provision()
            if config.store.kind is StoreKind.JETSTREAM:
                # Opened first by the only user who may create its stream.
                await run.store().exists("bucket")
            run.write_state(server.url, places, is_service=is_service)
            server_pid = lambda: server.pid  # noqa: E731
        recorder = asyncio.create_task(record_processor(bus, server_pid), name="processor")
        stack.callback(recorder.cancel)
        yield bus
