"""`penstock serve`: serves users from a run or from the folder of a model, until stopped.

A run continues in its own folder and log with its next versions, and `penstock replay` covers both
parts. A folder in Hugging Face layout becomes version 0 of a new run; `infra/configs/serve.toml`
is then adapted to the context length and the chat format of the model.
"""

import argparse
import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from penstock.actors.monitor.log_lines import describe
from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.open import PENSTOCK
from penstock.actors.policy.hf.config import read_hf_config
from penstock.actors.runtime.files import write_atomic
from penstock.actors.trainer.config import MidtrainConfig
from penstock.gateway.keys import create_key
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.config.file import apply_overrides, parse_config, read_toml
from penstock.infra.config.former_names import with_present_prepare
from penstock.infra.config.settings import RunConfig
from penstock.infra.logs import launcher_log
from penstock.infra.models.claim import read_tokenizer
from penstock.infra.run.command import new_folder, parse_new
from penstock.infra.run.hosts import check_outside
from penstock.infra.run.interruption import before, interruption
from penstock.infra.run.launcher import Processes, event_server
from penstock.infra.run.prepare import prepare
from penstock.infra.run.progress import TYPES, Progress, forget_gateways
from penstock.infra.run.replay import run_started
from penstock.infra.run.runs import RunDir, check_log, check_space, find_run
from penstock.infra.serve.settings import service_config, service_tables
from penstock.messages.control import RunClosed, RunOpened
from penstock.messages.errors import BusError, ConfigError, DeadlineError
from penstock.messages.weights import WeightsPublished

Table = dict[str, Any]


def fit(data: Table, folder: Path) -> None:
    """Adapt the tables of a service configuration, in place, to a model.

    Args:
        data: Tables of the configuration, with defaults for context and chat format.
        folder: Folder of the model.

    Raises:
        ConfigError: The tokenizer is missing, or does not work on bytes.
        ModelFormatError: The model has an unsupported format; the text names file and key.

    """
    positions = read_hf_config(folder).max_position_embeddings
    generator, limits = data["generator"], data["prepare"]["limits"]
    for table in (generator, limits):
        table["num_tokens_max"] = min(table["num_tokens_max"], positions)
    # No corpora are configured, but the sequence length is checked against the context anyway.
    midtrain = data["trainer"].setdefault("midtrain", {})
    midtrain["sequence_tokens"] = min(MidtrainConfig().sequence_tokens, positions)
    # Half of the context for a reply leaves the other half for the conversation before it.
    half = max(1, generator["num_tokens_max"] // 2)
    limits["turn_tokens_max"] = min(limits["turn_tokens_max"], half)
    data["gateway"]["reply_tokens_max"] = min(data["gateway"]["reply_tokens_max"], half)
    try:
        PenstockChat(read_tokenizer(folder))
    except ConfigError:
        return
    data["model"]["chat"] = PENSTOCK


CHECKPOINT_CONFIG = Path(__file__).parents[1] / "configs" / "serve.toml"
FIRST_VERSION_S_MAX = 3600.0
"""Longest wait in seconds for version 0 of a model."""


def serve(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM; return 0 after an orderly end."""
    if arguments.ungated:
        arguments.overrides.append("serve.gated=false")
    run_dir, run = _target(arguments)
    config = service_config(run, learns=arguments.learn)
    check_outside(config, list(config.processes))
    log_file, section = run_dir.logs / "launcher.log", config.run
    with run_dir.lock(), launcher_log(log_file, section.log_level, section.log_format):
        check_space(run_dir.path)
        write_atomic(run_dir.service, tomli_w.dumps(service_tables(config)).encode())
        asyncio.run(_serve(run_dir, config))
    return 0


def _target(arguments: argparse.Namespace) -> tuple[RunDir, RunConfig]:
    """Return the run to serve and its configuration; create a run for the folder of a model."""
    folder = Path(arguments.target).expanduser()
    if not (folder / "config.json").is_file() or (folder / "config.toml").exists():
        for option in ("config", "run_id"):
            if getattr(arguments, option) is not None:
                text = "expected only with the folder of a model"
                raise ConfigError(f"--{option.replace('_', '-')}: {text}, got a run")
        run_dir = find_run(arguments.target, arguments.runs_dir)
        data = apply_overrides(with_present_prepare(read_toml(run_dir.config)), arguments.overrides)
        return run_dir, parse_config(data, str(run_dir.config))
    file = arguments.config or CHECKPOINT_CONFIG
    overrides = [*arguments.overrides, f'model.checkpoint="{folder.resolve()}"']
    data: dict[str, Any] = read_toml(file)
    if arguments.config is None:
        fit(data, folder)
    data = apply_overrides(data, overrides)
    config = parse_new(data, str(file))
    service_config(config, learns=arguments.learn)
    return new_folder(data, config, arguments), config


async def _serve(run_dir: RunDir, config: RunConfig) -> None:
    progress = Progress()
    progress.say(f"service on run {run_dir.run_id} in {run_dir.path}")
    roles = {spec for specs in config.processes.values() for spec in specs}
    if "trainer" in roles and "gatekeeper" not in roles:
        progress.say("warning: no gates: all users get every version immediately (--ungated)")
    if "gatekeeper" in roles and config.gatekeeper.offline.num_tasks == 0:
        text = "gates: only guards and the test on users; versions are not evaluated on tasks"
        progress.say(f"{text} (gatekeeper.offline.num_tasks = 0)")
    # Addresses of gateways of an earlier start must not be announced again.
    create_key(run_dir.gateway_key, key_id="local", has_consent=True)
    forget_gateways(run_dir)
    with interruption() as interrupted:
        async with event_server(run_dir, config, is_service=True) as bus:
            await check_log(bus)
            cached: list[str] = []
            preparing = prepare(config, run_dir.store(), progress.say, cached.append)
            if not await before(interrupted, preparing):
                return
            incarnation = f"{time.time_ns():x}-{os.getpid():x}"
            opened = RunOpened(incarnation=incarnation, is_service=True)
            await bus.publish([await run_started(run_dir, config, cached), opened])
            try:
                if await before(interrupted, _make_first_version(run_dir, config, bus, progress)):
                    await before(interrupted, _keep_up(run_dir, config, bus, progress))
            finally:
                with contextlib.suppress(BusError, DeadlineError):
                    await bus.publish([RunClosed(incarnation=incarnation, is_complete=False)])
    progress.say(f"stopped; continue with: penstock serve {run_dir.run_id}")


async def _keep_up(run_dir: RunDir, config: RunConfig, bus: NatsBus, progress: Progress) -> None:
    """Run the processes of the service until cancelled; then drain open requests and stop."""
    processes = Processes(run_dir, config, list(config.processes), gives_up=False)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(processes.watch(bus), name="watch")
            group.create_task(_tell(bus, progress), name="progress")
            group.create_task(progress.follow_gateways(run_dir), name="gateways")
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        progress.say("stopping: waiting for open requests (Ctrl-C again: stop immediately)")
        await processes.stop()


async def _make_first_version(
    run_dir: RunDir, config: RunConfig, bus: NatsBus, progress: Progress
) -> None:
    """Run a trainer until it publishes version 0, if the service has no trainer of its own.

    Raises:
        DeadlineError: Version 0 was not published within FIRST_VERSION_S_MAX.

    """
    specs = [spec for specs in config.processes.values() for spec in specs]
    if "trainer" in specs or await bus.last(WeightsPublished) is not None:
        return
    progress.say("making version 0")
    maker = msgspec.structs.replace(config, processes={"trainer": ["trainer"]})
    processes = Processes(run_dir, maker, ["trainer"])
    watching = asyncio.create_task(processes.watch(bus), name="watch")
    # Watched together: a trainer that cannot start ends the wait at once, with its error.
    published = asyncio.create_task(anext(bus.follow([WeightsPublished])), name="version 0")
    tasks: set[asyncio.Task[Any]] = {watching, published}
    try:
        done, _ = await asyncio.wait(
            tasks, timeout=FIRST_VERSION_S_MAX, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()
        if not done:
            raise DeadlineError(f"run {run_dir.run_id}: no version 0; see {run_dir.logs}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await processes.stop()


async def _tell(bus: NatsBus, progress: Progress) -> None:
    """Print a line for each event from now on."""
    since = time.time()
    async for delivery in bus.follow(TYPES):
        if delivery.stored_at >= since and (line := describe(delivery.event, since)):
            progress.say(line.text)
