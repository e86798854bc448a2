"""`penstock tinker`: serves the API of the `tinker` SDK from a model's folder, until stopped."""

import argparse
import asyncio
import contextlib
import os
import time
from pathlib import Path

from penstock.actors.policy.hf.stored import stored_model
from penstock.gateway.keys import create_key
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.config.file import apply_overrides, load_config, parse_config, read_toml
from penstock.infra.config.settings import RunConfig
from penstock.infra.logs import launcher_log
from penstock.infra.models.claim import claim_model, fill_shape, read_tokenizer
from penstock.infra.run.command import new_folder
from penstock.infra.run.hosts import with_whole_paths
from penstock.infra.run.interruption import before, interruption
from penstock.infra.run.launcher import Processes, event_server
from penstock.infra.run.progress import Progress
from penstock.infra.run.replay import run_started
from penstock.infra.run.runs import RunDir, check_log, check_space, find_run
from penstock.messages.control import RunClosed, RunOpened
from penstock.messages.errors import BusError, ConfigError, DeadlineError

TINKER_CONFIG = Path(__file__).parents[1] / "configs" / "tinker.toml"
_POLL_S = 0.2


def tinker_command(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM; return 0 after an orderly end."""
    run_dir, config = _target(arguments)
    log_file, section = run_dir.logs / "launcher.log", config.run
    with run_dir.lock(), launcher_log(log_file, section.log_level, section.log_format):
        check_space(run_dir.path)
        asyncio.run(_serve(run_dir, config))
    return 0


def _target(arguments: argparse.Namespace) -> tuple[RunDir, RunConfig]:
    folder = Path(arguments.target).expanduser()
    if not (folder / "config.json").is_file():
        if arguments.config or arguments.run_id or arguments.overrides:
            raise ConfigError("--config, --run-id, --set: expected only with a model's folder")
        run_dir = find_run(arguments.target, arguments.runs_dir)
        config = load_config(run_dir.config)
        if "tinker" not in config.processes:
            raise ConfigError(f"run {run_dir.run_id}: expected one that penstock tinker began")
        return run_dir, config
    file = arguments.config or TINKER_CONFIG
    overrides = [*arguments.overrides, f'model.checkpoint="{folder.resolve()}"']
    data = apply_overrides(read_toml(file), overrides)
    data |= with_whole_paths(data)
    fill_shape(data)
    generator, policy = data.setdefault("generator", {}), data["policy"]
    positions = policy["max_position_embeddings"]
    generator["num_tokens_max"] = min(generator.get("num_tokens_max", positions), positions)
    config = parse_config(data, str(file), is_start=True)
    read_tokenizer(folder)
    return new_folder(data, config, arguments), config


async def _serve(run_dir: RunDir, config: RunConfig) -> None:
    progress = Progress()
    run_dir.tinker_url.unlink(missing_ok=True)
    create_key(run_dir.gateway_key, key_id="local", has_consent=True)
    with interruption() as interrupted:
        async with event_server(run_dir, config) as bus:
            await check_log(bus)
            if await stored_model(run_dir.store()) is None:
                await claim_model(config.model, config.policy, run_dir.store())
            incarnation = f"{time.time_ns():x}-{os.getpid():x}"
            opened = RunOpened(incarnation=incarnation, is_service=True)
            await bus.publish([await run_started(run_dir, config), opened])
            try:
                await before(interrupted, _keep_up(run_dir, config, bus, progress))
            finally:
                with contextlib.suppress(BusError, DeadlineError):
                    await bus.publish([RunClosed(incarnation=incarnation, is_complete=False)])
    progress.say(f"stopped; continue with: penstock tinker {run_dir.run_id}")


async def _keep_up(run_dir: RunDir, config: RunConfig, bus: NatsBus, progress: Progress) -> None:
    processes = Processes(run_dir, config, list(config.processes), gives_up=False)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(processes.watch(bus), name="watch")
            group.create_task(_announce(run_dir, progress), name="announce")
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        await processes.stop()


async def _announce(run_dir: RunDir, progress: Progress) -> None:
    """Print the address of each start of the server."""
    printed = ""
    while True:
        url = run_dir.tinker_url.read_text() if run_dir.tinker_url.is_file() else printed
        if url != printed:
            key = f"tml-$(cat {run_dir.gateway_key})"
            progress.say(f"TINKER_BASE_URL={url} TINKER_API_KEY={key}")
        printed = url
        await asyncio.sleep(_POLL_S)
