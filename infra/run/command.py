"""`penstock run`: executes one run, from its configuration to its closing table."""

import argparse
import asyncio
import contextlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from penstock.actors.runtime.files import write_atomic
from penstock.envs.microvm.images.assets import were_assets_built_before
from penstock.gateway.keys import create_key
from penstock.infra.bus.collector import Collector, collect_if_possible
from penstock.infra.bus.jetstream.access import open_access
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.jetstream.event_publisher import PUBLISH_S_MAX
from penstock.infra.config.file import (
    Table,
    apply_overrides,
    load_config,
    parse_config,
    read_toml,
)
from penstock.infra.config.settings import RunConfig, is_gateway
from penstock.infra.images import images_beside
from penstock.infra.judge.calibration import check_calibration
from penstock.infra.logs import launcher_log
from penstock.infra.models.claim import fill_shape, open_model
from penstock.infra.models.environment import check_environments
from penstock.infra.run.closing import close_run, next_steps
from penstock.infra.run.hosts import (
    check_apart,
    check_devices,
    check_new,
    check_outside,
    join_run,
    roles_of,
    with_whole_paths,
)
from penstock.infra.run.interruption import INTERRUPTED, before, interruption
from penstock.infra.run.launcher import OpenServer, Processes, event_server, own_server
from penstock.infra.run.liveness import until_installed, until_silent
from penstock.infra.run.prepare import prepare
from penstock.infra.run.progress import Progress, forget_gateways
from penstock.infra.run.replay import run_started
from penstock.infra.run.runs import RunDir, check_log, check_space, find_run, remove_needless
from penstock.infra.run.users import run_users
from penstock.messages.control import RunClosed, RunOpened
from penstock.messages.errors import BusError, ConfigError, DeadlineError

UNSOUND = 1
RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Pattern of run ids, which serve as folder names and as tokens of NATS subjects."""


def run(arguments: argparse.Namespace, open_server: OpenServer = own_server) -> int:
    """Run the command; return 0 if the run is complete and sound, 130 after Ctrl-C."""
    with images_beside() if arguments.images else contextlib.nullcontext():
        run_dir, config = _open(arguments)
        names = _names(config, arguments.processes)
        # Two launchers of one run would both start its processes.
        log_file, section = run_dir.logs / "launcher.log", config.run
        with run_dir.lock(), launcher_log(log_file, section.log_level, section.log_format):
            check_space(run_dir.path)
            arguments.since = _start(arguments.since)
            return asyncio.run(_run(run_dir, config, names, arguments, open_server))


def _start(since: float | None) -> float:
    """Return the start of the run in unix seconds.

    Raises:
        ConfigError: `--since` is not a time within the last day.

    """
    now = time.time()
    # One second of tolerance: make counts in whole seconds.
    if since is not None and not now - 86400.0 <= since <= now + 1.0:
        raise ConfigError(f"--since: expected unix seconds of the last day, got {since:g}")
    return now if since is None else min(since, now)


def _open(arguments: argparse.Namespace) -> tuple[RunDir, RunConfig]:
    if arguments.or_resume and (arguments.resume or not arguments.run_id):
        raise ConfigError("--or-resume: expected together with --run-id, and without --resume")
    if arguments.resume:
        return _resume(arguments)
    try:
        return _create(arguments)
    except FileExistsError:
        if not arguments.or_resume:
            raise
    arguments.resume = arguments.run_id
    if RunDir(Path(arguments.runs_dir) / arguments.run_id).config.exists():
        # The folder is on this host, so the launcher has only been restarted.
        arguments.config = None
    return _resume(arguments)


def _create(arguments: argparse.Namespace) -> tuple[RunDir, RunConfig]:
    if arguments.config is None:
        raise ConfigError("run: expected --config FILE for a new run, or --resume RUN")
    overrides = list(arguments.overrides)
    if arguments.fresh:
        overrides.append("trainer.midtrain.uses_cache=false")
    if arguments.seed is not None:
        overrides.append(f"run.seed={arguments.seed}")
    data = apply_overrides(read_toml(arguments.config), overrides)
    config = parse_new(data, str(arguments.config))
    names = _names(config, arguments.processes)
    check_outside(config, names, has_torch=arguments.after is None)
    check_environments(config.generator, [config.processes[name] for name in names])
    return new_folder(data, config, arguments), config


def parse_new(data: Table, source: str) -> RunConfig:
    """Complete and check the tables of a new run, including the files of its model.

    Raises:
        ConfigError: A setting is wrong or a file is missing.
        ModelFormatError: The checkpoint has an unsupported format.

    """
    data |= with_whole_paths(data)
    fill_shape(data)
    config = parse_config(data, source, is_start=True)
    config.prepare.check_new(has_model=bool(config.model.checkpoint))
    check_calibration(config.judge)
    if config.model.checkpoint:
        open_model(config.model, config.policy)
    return config


def new_folder(data: Table, config: RunConfig, arguments: argparse.Namespace) -> RunDir:
    """Create the folder of a new run, `--run-id` in `--runs-dir`, with its configuration.

    Raises:
        ConfigError: The run id has invalid characters.
        FileExistsError: The run exists already.

    """
    run_id = arguments.run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-s{config.run.seed}"
    if not RUN_ID.fullmatch(run_id):
        raise ConfigError(f"--run-id: expected letters, digits, '_' and '-', got {run_id!r}")
    run_dir = RunDir(Path(arguments.runs_dir).resolve() / run_id)
    if run_dir.config.exists():
        raise FileExistsError(f"run {run_id}: exists; resume it with --resume {run_id}")
    if config.bus.servers:
        asyncio.run(check_new(open_access(config.bus), run_id))
    write_atomic(run_dir.config, tomli_w.dumps(data).encode())
    return run_dir


def _resume(arguments: argparse.Namespace) -> tuple[RunDir, RunConfig]:
    if arguments.config is None:
        run_dir = find_run(arguments.resume, arguments.runs_dir)
    else:
        joining = join_run(
            arguments.resume,
            arguments.runs_dir,
            arguments.config,
            compares=not arguments.or_resume,
        )
        run_dir = asyncio.run(joining)
    config = load_config(run_dir.config, is_start=True)
    names = _names(config, arguments.processes)
    check_outside(config, names, has_torch=arguments.after is None)
    return run_dir, config


def _names(config: RunConfig, given: str | None) -> list[str]:
    """Return the entries of `[processes]` that start on this host.

    Raises:
        ConfigError: An entry does not exist, or the others cannot run on other hosts.

    """
    if given is None:
        return list(config.processes)
    names = [name for name in given.split(",") if name]
    for name in names:
        if name not in config.processes:
            choices = ", ".join(config.processes)
            raise ConfigError(f"--processes: expected some of {choices}, got {name!r}")
    if len(names) < len(config.processes):
        check_apart(config)
    specs = [spec for name in names for spec in config.processes[name]]
    if config.users.num_requests and not any(is_gateway(spec) for spec in specs):
        raise ConfigError("users.num_requests: expected the role gateway among --processes")
    return names


async def _run(
    run_dir: RunDir,
    config: RunConfig,
    names: Sequence[str],
    arguments: argparse.Namespace,
    open_server: OpenServer,
) -> int:
    progress = Progress([each.name for each in config.evaluator.all_sets])
    progress.say(f"run {run_dir.run_id} in {run_dir.path}")
    create_key(run_dir.gateway_key, key_id="local", has_consent=True)
    forget_gateways(run_dir)
    with interruption() as interrupted:
        async with event_server(run_dir, config, open_server=open_server) as bus:
            work = (run_dir, config, names, bus, progress, interrupted)
            complete = await _work(*work, arguments.after, arguments.since)
            if complete:
                remove_needless(run_dir, config.sandbox_host.checkpoints)
                collector = Collector(bus, run_dir.store())
                await collect_if_possible(collector, grace_s=PUBLISH_S_MAX)
                is_sound = await close_run(
                    *(run_dir, config, bus, progress.say),
                    started_at=arguments.since,
                    with_replay=not arguments.no_replay,
                )
                for line in next_steps(run_dir, config):
                    progress.say(line)
                return 0 if is_sound else UNSOUND
    progress.say(f"stopped; resume with: penstock run --resume {run_dir.run_id}")
    return INTERRUPTED


async def _work(  # noqa: PLR0913, PLR0917 - all of a run
    run_dir: RunDir,
    config: RunConfig,
    names: Sequence[str],
    bus: NatsBus,
    progress: Progress,
    interrupted: asyncio.Event,
    installer: int | None,
    since: float,
) -> bool:
    """Execute the run; return True once it is complete, False if a signal stopped it."""
    await check_log(bus)
    cached: list[str] = []
    preparing = prepare(config, run_dir.store(), progress.say, cached.append)
    if not await before(interrupted, preparing):
        return False
    # Tasks are prepared while an installer is still fetching torch; only devices need it.
    if installer is not None:
        if not await before(interrupted, until_installed(installer, "torch")):
            return False
        check_devices(config, names)
    boots_uml = config.sandbox_host.pool.backend == "uml"
    if "sandbox_host" in roles_of(config, names) and boots_uml and were_assets_built_before(since):
        cached.append("kernel and image of machines")
    incarnation = f"{time.time_ns():x}-{os.getpid():x}"
    # Published before any process starts: actors on other hosts wait for these events.
    started = await run_started(run_dir, config, cached)
    await bus.publish([started, RunOpened(incarnation=incarnation)])
    processes = Processes(run_dir, config, names)
    is_complete = False
    try:
        is_complete = await _until_complete(run_dir, config, bus, processes, progress, interrupted)
        return is_complete
    finally:
        if progress.is_midtraining:
            progress.say("after a resume, mid-training continues from its last save")
        progress.say("stopping the actors (Ctrl-C again: at once)")
        # RunClosed goes first so that actors on other hosts stop, too; the servers themselves
        # may be the reason for stopping.
        with contextlib.suppress(BusError, DeadlineError):
            await bus.publish([RunClosed(incarnation=incarnation, is_complete=is_complete)])
        await processes.stop()
        if len(names) < len(config.processes):
            await until_silent(bus)


async def _until_complete(  # noqa: PLR0913, PLR0917 - all of a run
    run_dir: RunDir,
    config: RunConfig,
    bus: NatsBus,
    processes: Processes,
    progress: Progress,
    interrupted: asyncio.Event,
) -> bool:
    """Watch the processes; return True once the run is complete, False after a signal.

    Raises:
        DeadlineError: `run.wall_s_max` passed.

    """
    side_tasks = [
        asyncio.create_task(run_users(run_dir, config, bus), name="sample users"),
        asyncio.create_task(progress.follow_gateways(run_dir), name="gateways"),
    ]
    followed = asyncio.create_task(progress.follow(bus), name="progress")
    tasks: set[asyncio.Task[Any]] = {
        asyncio.create_task(processes.watch(bus), name="watch"),
        asyncio.create_task(interrupted.wait(), name="interrupt"),
        followed,
    }
    try:
        done, _ = await asyncio.wait(
            tasks, timeout=config.run.wall_s_max, return_when=asyncio.FIRST_COMPLETED
        )
        # Raises what ended the watch; a run that is complete or interrupted raises nothing.
        for task in done:
            await task
        if not done:
            text = f"run {run_dir.run_id}: not complete after {config.run.wall_s_max:.0f} s"
            raise DeadlineError(f"{text}; see `penstock status {run_dir.run_id}`")
        return followed in done
    finally:
        for task in (*tasks, *side_tasks):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, *side_tasks, return_exceptions=True)
