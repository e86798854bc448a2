"""Runs on several hosts: a host gets the configuration from the log, not from the launcher.

```
 launcher ── RunStarted (configuration), RunOpened ... RunClosed ──▶ log ─┬▶ penstock actor
                                                                         └▶ penstock status
```
A file on each host says how to reach the servers and the store; the rest comes from the log.
"""

import argparse
import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import tomli_w

from penstock.actors.judge.rubric.endpoint import read_key
from penstock.actors.runtime.files import write_atomic
from penstock.envs.backends import open_backend
from penstock.envs.microvm.images.assets import is_build_running
from penstock.infra.bus.jetstream.access import Access, open_access
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.jetstream.connection import JetStreamError, NatsConnection
from penstock.infra.bus.jetstream.provision import stream_name
from penstock.infra.bus.settings import FILES, BusSection
from penstock.infra.config.file import Table, load_config, read_toml
from penstock.infra.config.regions import region_of_role
from penstock.infra.config.settings import RunConfig
from penstock.infra.run.liveness import POLL_S, last_stored
from penstock.infra.run.roles import REGIONAL
from penstock.infra.run.runs import RunDir, find_run
from penstock.infra.stores.memory import MemoryStore
from penstock.infra.stores.open import check_store, read_section
from penstock.infra.stores.settings import StoreKind
from penstock.messages.base import check_format
from penstock.messages.control import RunStarted
from penstock.messages.errors import ConfigError, DeadlineError, NotFoundError
from penstock.messages.reading.parsing import parse_toml
from penstock.messages.streams import type_filter

OWN_TABLES = ("bus", "store")
"""Tables that may differ from host to host: addresses and paths."""
READS_CONTENT = {"trainer", "rank", "gateway"}
"""Roles that encrypt or decrypt user content."""
READ_S_MAX = 30.0


async def reached_run(arguments: argparse.Namespace, *, any_format: bool = False) -> RunDir:
    """Find the run that a command names, by its folder or, with `--config`, by its log.

    Raises:
        NotFoundError: The run does not exist.
        ConfigError: `[bus]` or `[store]` of the file is wrong.
        FormatError: The run has another format version, unless `any_format` accepts it.

    """
    if arguments.config is None:
        return find_run(arguments.run, arguments.runs_dir, any_format=any_format)
    return await join_run(
        arguments.run, arguments.runs_dir, arguments.config, any_format=any_format
    )


async def join_run(  # noqa: PLR0913
    name: str,
    root: Path,
    file: Path,
    *,
    wait_s: float = 0.0,
    any_format: bool = False,
    compares: bool = True,
) -> RunDir:
    """Create a folder on this host for a run that another host started.

    Args:
        name: Id of the run, or `latest` for the newest on the servers.
        root: Folder of all runs.
        file: TOML file with `[bus]` and `[store]` of this host; other tables must equal those of
            the run.
        wait_s: Longest wait in seconds for the run to start.
        any_format: Accept any format version.
        compares: Whether other tables of the file are compared with the run, not ignored.

    Raises:
        ConfigError: The file contradicts the run, or the servers refuse the connection.
        NotFoundError: The servers do not know the run.
        DeadlineError: The run did not start in time.

    """
    own = read_toml(file)
    section = read_section(own, str(file), "bus", BusSection)
    if not section.servers:
        raise ConfigError(f"{file}: bus.servers: expected the servers that hold the run's log")
    started = await _until_started(open_access(section), name, wait_s)
    if not any_format:
        check_format(started.format, f"the log of run {started.run_id}")
    recorded = parse_toml(started.config_toml, "RunStarted.config_toml")
    for table, value in own.items():
        if compares and table not in OWN_TABLES and value != recorded.get(table):
            text = f"expected that of the run, or none: only {', '.join(OWN_TABLES)} may differ"
            raise ConfigError(f"{file}: {table}: {text}")
    tables = {name: with_whole_paths(own)[name] for name in OWN_TABLES if name in own}
    run = _folder(root, started.run_id)
    write_atomic(run.config, tomli_w.dumps(recorded | tables).encode())
    return run


_PATHS: dict[str, Sequence[str]] = {
    "bus": FILES,
    "store": ("master_key_file",),
    "prepare": ("tasks",),
    "gateway": ("tls_cert", "tls_key"),
    "sandbox_host": ("checkpoints", "images"),
}
"""Fields that are paths, by table; `fill_shape` makes those of `[model]` absolute."""
_LISTED_PATHS = (("prepare", "sources", "path"), ("judge", "judges", "calibration"))
"""Fields that are paths in lists of tables."""


def _folder(root: Path, run_id: str) -> RunDir:
    return RunDir(root.resolve() / run_id)


def with_whole_paths(data: dict[str, Any]) -> dict[str, Any]:
    """Return the tables with absolute paths, valid from every folder."""
    found = data | {
        name: _with_whole_paths(data[name], files)
        for name, files in _PATHS.items()
        if isinstance(data.get(name), dict)  # Anything else is refused when it is parsed.
    }
    for table, name, field in _LISTED_PATHS:
        if isinstance(found.get(table), dict) and isinstance(items := found[table].get(name), list):
            whole = [
                _with_whole_paths(cast("Table", item), (field,)) if isinstance(item, dict) else item
                for item in cast("list[object]", items)
            ]
            found[table] = found[table] | {name: whole}
    return found


def _with_whole_paths(table: Table, files: Sequence[str]) -> dict[str, Any]:
    paths = {name: path for name in files if isinstance(path := table.get(name), str) and path}
    return table | {name: str(Path(path).resolve()) for name, path in paths.items()}


async def _until_started(access: Access, name: str, wait_s: float) -> RunStarted:
    """Return the first event of a run; wait for it if `wait_s` is positive."""
    run_id = await newest_run(access) if name == "latest" else name
    bus = await NatsBus.connect(access, run_id=run_id, store=MemoryStore(), name="join")
    try:
        await bus.check_jetstream()
        async with asyncio.timeout(max(wait_s, READ_S_MAX)):
            while (started := await last_stored(bus, RunStarted)) is None:
                if not wait_s:
                    raise NotFoundError(f"run {name!r}: {access.place} has no log of it")
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise DeadlineError(f"run {name}: not started within {wait_s:g} s") from error
    finally:
        await bus.close()
    assert isinstance(started.event, RunStarted)
    return started.event


async def newest_run(access: Access) -> str:
    """Return the id of the run that started last.

    Raises:
        NotFoundError: The servers hold none.

    """
    connection = await NatsConnection.connect(access, "join")
    call = f"STREAM.MSG.GET.{stream_name(RunStarted.stream)}"
    try:
        subject = type_filter("*", RunStarted)
        answer = await connection.api(call, {"last_by_subj": subject})
    except JetStreamError as error:
        raise NotFoundError(f"{access.place} has no log of any run: {error}") from error
    finally:
        await connection.close()
    return str(answer["message"]["subject"]).split(".")[1]


def check_remote(run: RunDir, roles: Sequence[str]) -> None:
    """Check that these roles can run in one process without the folder of the launcher.

    Raises:
        ConfigError: They need objects in a folder of another host, or a bucket refuses access.

    """
    config = load_config(run.config)
    check_apart(config)
    check_stores(config)
    for role in roles:
        kind = role.partition(":")[0]
        if kind in READS_CONTENT and not config.store.master_key_file:
            text = "expected a copy of the file on the host of the launcher"
            raise ConfigError(f"store.master_key_file: role {role}: {text}")
        if kind not in REGIONAL:
            continue
        region = config.region(region_of_role(role))
        if not region.bucket and f"relay:{region.name}" not in roles:
            text = f"expected one, or relay:{region.name} in the same process, got {list(roles)}"
            raise ConfigError(f"regions.{region.name}.bucket: {text}")


def check_apart(config: RunConfig) -> None:
    """Check that processes of this run can run on other hosts than its launcher.

    Raises:
        ConfigError: They would need objects in the folder of the launcher.

    """
    if not config.bus.servers:
        raise ConfigError("bus.servers: expected servers that all hosts reach, got none")
    if config.store.kind is StoreKind.DIRECTORY:
        expected = '"s3" or "jetstream" for processes on several hosts'
        raise ConfigError(f"store.kind: expected {expected}, got {config.store.kind.value!r}")


async def check_new(access: Access, run_id: str) -> None:
    """Create the streams, and check that the servers hold no run with this id.

    Raises:
        ConfigError: The servers cannot store the streams.
        FileExistsError: The servers hold a run with this id.

    """
    bus = await NatsBus.connect(access, run_id=run_id, store=MemoryStore(), name="launcher")
    try:
        await bus.provision()
        if await last_stored(bus, RunStarted) is not None:
            text = f"exists at {access.place}; resume it with --resume {run_id} --config FILE"
            raise FileExistsError(f"run {run_id}: {text}")
    finally:
        await bus.close()


def roles_of(config: RunConfig, names: Sequence[str]) -> set[str]:
    """Return the roles of some entries of `[processes]`."""
    return {spec.partition(":")[0] for name in names for spec in config.processes[name]}


def check_outside(config: RunConfig, names: Sequence[str], *, has_torch: bool = True) -> None:
    """Check before a start that this host has the machines, devices, keys and stores it needs.

    Raises:
        BackendUnavailable: A sandbox host cannot boot machines; the text says how to install what
            is missing.
        DeviceUnavailableError: A GPU that a setting names does not exist; needs `has_torch`.
        ConfigError: A bucket is not usable, or a judge's key is missing.

    """
    if "sandbox_host" in roles_of(config, names) and not is_build_running():
        open_backend(
            config.sandbox_host.pool.backend, allow_process=config.sandbox_host.pool.allow_process
        )
    if has_torch:
        check_devices(config, names)
    check_judge_keys(config, names)
    check_stores(config)


def check_devices(config: RunConfig, names: Sequence[str]) -> None:
    """Check that the devices of some entries of `[processes]` exist.

    Raises:
        DeviceUnavailableError: A GPU that a setting names does not exist.

    """
    # vLLM checks its device itself.
    if config.trainer.device != "cpu" and "rank" in roles_of(config, names):
        from penstock.actors.policy.device import check_device  # Imports torch.

        check_device(config.trainer.device, "trainer.device")


def check_judge_keys(config: RunConfig, names: Sequence[str]) -> None:
    """Check that the API keys of rubric judges exist if some entries run the judge.

    Raises:
        ConfigError: A key is missing or malformed.

    """
    if "judge" in roles_of(config, names):
        for judge in config.judge.judges:
            if judge.endpoint is not None:
                read_key(judge.endpoint, os.environ)


def check_stores(config: RunConfig) -> None:
    """Check that the buckets of the run and of its regions are usable.

    Raises:
        ConfigError: A bucket is not usable; the text names the field, the bucket and the operation.

    """
    check_store(config.store, "store")
    for region in config.regions:
        if section := region.store_section():
            check_store(section, f"regions.{region.name}")
