"""`penstock actor ROLE ...`: one operating-system process that runs one or more actors."""

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from penstock.actors.runtime.event_dispatcher import FoldStuckError
from penstock.actors.runtime.host import ActorHost
from penstock.actors.runtime.in_progress import InProgress
from penstock.actors.runtime.processor_time import ProcessorTime
from penstock.infra.bus.jetstream.access import Access
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.config.file import load_config
from penstock.infra.config.settings import RunConfig
from penstock.infra.health import health_server
from penstock.infra.logs import configure_logs
from penstock.infra.run.charges import ExitCode
from penstock.infra.run.hosts import check_remote, join_run
from penstock.infra.run.liveness import START_S_MAX, until_closed, until_open
from penstock.infra.run.roles import Assembly, build_actors
from penstock.infra.run.runs import RunDir, connect, find_run, remove_needless
from penstock.messages.errors import PenstockError, StartAgainError

log = logging.getLogger(__name__)


async def run_actors(  # noqa: PLR0913 - all of a process
    run: RunDir,
    config: RunConfig,
    specs: Sequence[str],
    where: str | Access,
    in_progress: InProgress,
    *,
    is_apart: bool,
    health_port: int = 0,
) -> int:
    """Run the actors of `specs` (`role` or `role:region`) until SIGTERM, or until one fails.

    Returns:
        The exit code: 0, or START_AGAIN if the launcher, on another host, stopped before the run
        was complete.

    Args:
        run: Folder of the run on this host.
        config: Configuration of the run.
        specs: Roles of this process.
        where: NATS servers of the run.
        in_progress: Record of the items in progress, read by the launcher after a crash.
        is_apart: Whether no launcher started this process; it then runs while one is up on any
            host.
        health_port: Port that serves `/healthz` and `/readyz`; 0 disables it.

    Raises:
        PenstockError: The first actor's failure; the others are stopped in order first.

    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    hosts: dict[str, ActorHost] = {}
    # Health first: it answers "not up yet" while this process connects and waits for the run.
    async with (
        health_server(health_port, lambda: _not_ready(hosts)),
        connect(run, where, "+".join(specs).replace("/", ".")) as bus,
    ):
        if not is_apart:
            await _run_until(stop, run, config, specs, bus, in_progress, hosts)
            return 0
        opened_at = await _opened_at(bus, stop)
        if opened_at is None:
            return 0
        closing = asyncio.create_task(until_closed(bus, opened_at), name="launcher")
        # The same event as SIGTERM, so that actors stop in order when the launcher goes away.
        closing.add_done_callback(lambda _: stop.set())
        try:
            await _run_until(stop, run, config, specs, bus, in_progress, hosts)
            if closing.done() and not closing.result():
                log.warning("launcher of run %s stopped before the run was complete", run.run_id)
                return ExitCode.START_AGAIN
            if closing.done():
                log.info("run %s is complete", run.run_id)
                remove_needless(run, config.sandbox_host.checkpoints)
            return 0
        finally:
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)


def _not_ready(hosts: Mapping[str, ActorHost]) -> dict[str, str]:
    if not hosts:
        return {"process": "the run is not up yet"}
    return {name: why for name, host in hosts.items() if (why := host.not_ready)}


async def _opened_at(bus: NatsBus, stop: asyncio.Event) -> int | None:
    """Wait for a launcher with `until_open`; return None if a signal comes first."""
    opening = asyncio.create_task(until_open(bus), name="until open")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait([opening, stopped], return_when=asyncio.FIRST_COMPLETED)
        return opening.result() if opening.done() else None
    finally:
        for task in (opening, stopped):
            task.cancel()
        await asyncio.gather(opening, stopped, return_exceptions=True)


async def _run_until(  # noqa: PLR0913, PLR0917 - all of a process
    stop: asyncio.Event,
    run: RunDir,
    config: RunConfig,
    specs: Sequence[str],
    bus: NatsBus,
    in_progress: InProgress,
    hosts: dict[str, ActorHost],
) -> None:
    store = run.store()
    assembly = Assembly(run=run, config=config, bus=bus, store=store)
    actors = [named for spec in specs for named in await build_actors(spec, assembly)]
    processor = ProcessorTime()
    gc.collect()
    # Without this, every full collection stops the process for 60 ms to scan all imports.
    gc.freeze()
    async with asyncio.TaskGroup() as group:
        for name, actor in actors:
            hosts[name] = host = ActorHost(
                actor,
                bus,
                store,
                name=name,
                seed=config.run.seed,
                in_progress=in_progress,
                processor=processor,
            )
            group.create_task(host.run(stop), name=name)


def actor_command(arguments: argparse.Namespace) -> int:
    """Run the actors until they stop; return 0 or an `ExitCode`, with the reason on stderr.

    Raises:
        PenstockError: The run is not up.
        ConfigError: The roles cannot run apart from the launcher, or a file is wrong.

    """
    import uvloop

    file: Path | None = arguments.config
    if file is None:
        run = find_run(arguments.run, arguments.runs_dir)
    else:
        run = asyncio.run(join_run(arguments.run, arguments.runs_dir, file, wait_s=START_S_MAX))
        check_remote(run, arguments.roles)
    config = load_config(run.config_in_use)
    configure_logs(config.run.log_level, config.run.log_format)
    where = run.access() or _embedded(run, arguments.roles, arguments.in_progress)
    in_progress = InProgress(Path(arguments.in_progress) if arguments.in_progress else None)
    is_apart = file is not None
    port: int = arguments.health_port
    work = run_actors(
        run, config, arguments.roles, where, in_progress, is_apart=is_apart, health_port=port
    )
    code: int = ExitCode.FAILED
    try:
        code = uvloop.run(work)
    except* Exception as failures:
        code = ExitCode.CHARGED if in_progress.has_charged else ExitCode.FAILED
        if failures.subgroup(FoldStuckError):
            code = ExitCode.STUCK
        if failures.subgroup(StartAgainError):
            code = ExitCode.START_AGAIN
        for error in failures.exceptions:
            traceback.print_exception(error)
        roles = "+".join(arguments.roles)
        log.error("process of %s ends with exit code %d", roles, code)  # noqa: TRY400 - traced above
        sys.stderr.flush()
        # At once: a worker thread that hangs would keep the interpreter alive.
        os._exit(code)
    if any(role.partition(":")[0] == "rank" for role in arguments.roles):
        # A thread may be inside a step, and gloo may abort during an orderly exit.
        os._exit(code)
    return code


def _embedded(run: RunDir, roles: Sequence[str], in_progress: str) -> str:
    """Return the address of the embedded server, with the credentials of this process alone."""
    state = run.read_state()
    if state is None:
        raise PenstockError(
            f"run {run.run_id} is not up: start it, or pass --config FILE with bus.servers"
        )
    url = state.place(roles).url
    # The launcher names the file of items in progress after the process, as it does this one.
    identity = run.identities / Path(in_progress).name if in_progress else None
    if identity is None or not identity.is_file():
        return url
    parts = urlsplit(url)
    address = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{identity.read_text().strip()}@{address}"
