"""`penstock run`: one run from its configuration to its closing table."""

import argparse
import asyncio
import contextlib
import platform
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path

from penstock.infra.closing import close_run
from penstock.infra.config import (
    RunConfig,
    apply_overrides,
    load_config,
    parse_config,
    read_toml,
)
from penstock.infra.files import write_atomic
from penstock.gateway.keys import create_key
from penstock.infra.launcher import Processes, event_server
from penstock.infra.prepare import prepare
from penstock.infra.progress import Progress
from penstock.infra.runs import RunDir, find_run
from penstock.infra.sample_users import run_sample_users
from penstock.infra.toml_writer import to_toml
from penstock.messages.bus import Bus
from penstock.messages.control import RunStarted
from penstock.messages.errors import DeadlineError

INTERRUPTED = 130


def run(arguments: argparse.Namespace) -> int:
    """Run the command; 0 when the run is complete, 130 after Ctrl-C (state saved)."""
    run_dir, config = _resume(arguments) if arguments.resume else _create(arguments)
    with run_dir.lock():
        return asyncio.run(_run(run_dir, config, with_replay=not arguments.no_replay))


def _create(arguments: argparse.Namespace) -> tuple[RunDir, RunConfig]:
    overrides = list(arguments.overrides)
    if arguments.seed is not None:
        overrides.append(f"run.seed={arguments.seed}")
    data = apply_overrides(read_toml(arguments.config), overrides)
    config = parse_config(data, str(arguments.config))
    run_id = arguments.run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-s{config.run.seed}"
    run_dir = RunDir(Path(arguments.runs_dir).resolve() / run_id)
    if run_dir.config.exists():
        raise FileExistsError(f"run {run_id}: exists; go on with it by --resume {run_id}")
    write_atomic(run_dir.config, to_toml(data).encode())
    return run_dir, config


def _resume(arguments: argparse.Namespace) -> tuple[RunDir, RunConfig]:
    run_dir = find_run(arguments.resume, arguments.runs_dir)
    return run_dir, load_config(run_dir.config)


async def _run(run_dir: RunDir, config: RunConfig, *, with_replay: bool) -> int:
    progress = Progress(_say, steps_max=config.trainer.steps_max)
    progress.say(f"run {run_dir.run_id} in {run_dir.path}")
    started = time.time()
    create_key(run_dir.gateway_key, key_id="local", training_consent=True)
    async with event_server(run_dir, config) as (bus, url):
        await prepare(config.prepare, config.policy, run_dir.store(), config.run.seed, progress.say)
        await bus.publish([_run_started(run_dir, config)])
        processes = Processes(run_dir, config, url)
        try:
            complete = await _until_complete(run_dir, config, bus, processes, progress)
        finally:
            progress.say("stopping the actors")
            await processes.stop()
        if not complete:
            progress.say(f"saved; go on with: penstock run --resume {run_dir.run_id}")
            return INTERRUPTED
        await close_run(
            run_dir, config, bus, progress.say, started_at=started, with_replay=with_replay
        )
    return 0


async def _until_complete(
    run_dir: RunDir, config: RunConfig, bus: Bus, processes: Processes, progress: Progress
) -> bool:
    """Return True once the run is complete, False when a signal asks to stop.

    Raises:
        DeadlineError: `run.wall_s_max` passed.

    """
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted.set)
    users = asyncio.create_task(run_sample_users(run_dir, config, bus), name="sample users")
    followed = asyncio.create_task(progress.follow(bus, {}), name="progress")
    tasks = {
        asyncio.create_task(processes.watch(bus), name="watch"),
        asyncio.create_task(interrupted.wait(), name="interrupt"),
        followed,
    }
    try:
        done, _ = await asyncio.wait(
            tasks, timeout=config.run.wall_s_max, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            await task
        if not done:
            text = f"run {run_dir.run_id}: not complete after {config.run.wall_s_max:.0f} s"
            raise DeadlineError(f"{text}; see `penstock status {run_dir.run_id}`")
        return followed in done
    finally:
        for task in (*tasks, users):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, users, return_exceptions=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _run_started(run_dir: RunDir, config: RunConfig) -> RunStarted:
    return RunStarted(
        run_id=run_dir.run_id,
        seed=config.run.seed,
        config_toml=run_dir.config.read_text(),
        versions={
            "penstock": version("penstock"),
            "python": platform.python_version(),
            "torch": version("torch"),
            "platform": platform.platform(),
        },
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
