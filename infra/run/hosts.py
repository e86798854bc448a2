"""A run on several hosts: what a host learns from the log instead of the launcher's folder.

```
 launcher ── RunStarted (configuration), RunOpened ... RunClosed ──▶ log ─┬▶ penstock actor
                                                                         └▶ penstock status
```
A host's own file says how it reaches the servers and the store; everything else is the log's.
"""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from penstock.actors.runtime.files import write_atomic
from penstock.infra.bus.jetstream.access import Access, open_access
from penstock.infra.bus.jetstream.answers import JetStreamError
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.jetstream.connection import NatsConnection
from penstock.infra.bus.jetstream.provision import stream_name
from penstock.infra.bus.jetstream.puller import STREAM_NOT_FOUND
from penstock.infra.bus.settings import FILES, BusSection
from penstock.infra.regions.settings import region_of_role
from penstock.infra.run.config import RunConfig
from penstock.infra.run.config_file import load_config, read_toml
from penstock.infra.run.roles import REGIONAL
from penstock.infra.run.runs import RunDir, find_run
from penstock.infra.stores.memory import MemoryStore
from penstock.infra.stores.open import check_store, read_section
from penstock.infra.stores.settings import StoreKind
from penstock.messages.base import Event, Message, Stream, check_format
from penstock.messages.bus import Bus, Delivery
from penstock.messages.control import RunClosed, RunOpened, RunStarted
from penstock.messages.errors import BusError, ConfigError, DeadlineError, NotFoundError
from penstock.messages.reading.parsing import parse_toml
from penstock.messages.rpc import Ack
from penstock.messages.streams import type_filter
from penstock.messages.telemetry import ActorReported

OWN_TABLES = ("bus", "store")
"""What a host may have of its own: addresses and paths differ from host to host."""
LAUNCHER = "launcher"
ANSWER_S = 3.0
START_S_MAX = 600.0
"""How long a process waits for its run to start."""
READ_S_MAX = 30.0
POLL_S = 1.0
SILENT_S = 4.0
"""Actors report once a second: after this time none runs."""
STOP_S_MAX = 60.0


async def reached_run(arguments: argparse.Namespace, *, any_format: bool = False) -> RunDir:
    """Return the run that a command names: by its folder, or with `--config` by its log.

    Raises:
        NotFoundError: No such run.
        ConfigError: The file's `[bus]` or `[store]` is wrong.
        FormatError: It has another format version, unless `any_format` accepts it.

    """
    if arguments.config is None:
        return find_run(arguments.run, arguments.runs_dir, any_format=any_format)
    return await join_run(
        arguments.run, arguments.runs_dir, arguments.config, any_format=any_format
    )


async def join_run(
    name: str, root: Path, file: Path, *, wait_s: float = 0.0, any_format: bool = False
) -> RunDir:
    """Write this host's folder of a run that another host started.

    Args:
        name: The run's id; `latest` is the newest on the servers.
        root: Folder of all runs.
        file: TOML with the tables `[bus]` and `[store]` of this host; other tables must be the
            run's.
        wait_s: How long to wait for the run to start.
        any_format: Accept any format version.

    Raises:
        ConfigError: The file says otherwise, or the servers refuse us.
        NotFoundError: No such run on the servers.
        DeadlineError: It did not start in time.

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
        if table not in OWN_TABLES and value != recorded.get(table):
            text = f"expected the run's own, or none: only {', '.join(OWN_TABLES)} are a host's"
            raise ConfigError(f"{file}: {table}: {text}")
    tables = {name: with_whole_paths(own)[name] for name in OWN_TABLES if name in own}
    run = _folder(root, started.run_id)
    write_atomic(run.config, tomli_w.dumps(recorded | tables).encode())
    return run


def _folder(root: Path, run_id: str) -> RunDir:
    return RunDir(root.resolve() / run_id)


def with_whole_paths(data: dict[str, Any]) -> dict[str, Any]:
    """Return tables whose `[bus]` names its files by absolute paths, valid in every folder."""
    bus: Any = data.get("bus")
    if not isinstance(bus, dict):
        return data  # What is not a table is refused as such.
    table: dict[str, Any] = dict(bus)  # pyright: ignore[reportUnknownArgumentType]
    for name in FILES:
        if isinstance(path := table.get(name), str) and path:
            table[name] = str(Path(path).resolve())
    return data | {"bus": table}


async def _until_started(access: Access, name: str, wait_s: float) -> RunStarted:
    """Return a run's first event, as soon as it is there."""
    run_id = await newest_run(access) if name == "latest" else name
    bus = await NatsBus.connect(access, run_id=run_id, store=MemoryStore(), name="join")
    try:
        await bus.check_jetstream()
        async with asyncio.timeout(max(wait_s, READ_S_MAX)):
            while (started := await _last(bus, RunStarted)) is None:
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


async def _last(bus: Bus, kind: type[Event]) -> Delivery | None:
    """Return the newest event of a type; None, too, before the streams are there."""
    try:
        return await bus.last(kind)
    except JetStreamError as error:
        if error.code != STREAM_NOT_FOUND:
            raise
        return None


def check_remote(run: RunDir, roles: Sequence[str]) -> None:
    """Check that these roles can run in one process apart from the launcher's folder.

    Raises:
        ConfigError: They would look for objects in a folder of another host, or a bucket refuses.

    """
    config = load_config(run.config)
    check_apart(config)
    check_stores(config)
    for role in roles:
        kind = role.partition(":")[0]
        if kind == "publisher":
            text = "shares the snapshot with the trainer in a mapped file: start it on its host"
            raise ConfigError(f"role {role}: {text}")
        if kind not in REGIONAL:
            continue
        region = config.region(region_of_role(role))
        if not region.bucket and f"relay:{region.name}" not in roles:
            text = f"expected one, or relay:{region.name} in the same process, got {list(roles)}"
            raise ConfigError(f"regions.{region.name}.bucket: {text}")


def check_apart(config: RunConfig) -> None:
    """Check that processes of this run can be apart from its launcher.

    Raises:
        ConfigError: They would look for objects in the launcher's folder.

    """
    if not config.bus.servers:
        raise ConfigError("bus.servers: expected servers that all hosts reach, got none")
    if config.store.kind is StoreKind.DIRECTORY:
        expected = '"s3" or "jetstream" for processes on several hosts'
        raise ConfigError(f"store.kind: expected {expected}, got {config.store.kind.value!r}")


async def check_new(access: Access, run_id: str) -> None:
    """Make the streams, and check that the servers hold no run of this id yet.

    Raises:
        ConfigError: The servers cannot keep the streams.
        FileExistsError: They hold such a run.

    """
    bus = await NatsBus.connect(access, run_id=run_id, store=MemoryStore(), name="launcher")
    try:
        await bus.provision()
        if await _last(bus, RunStarted) is not None:
            text = f"exists at {access.place}; resume it with --resume {run_id} --config FILE"
            raise FileExistsError(f"run {run_id}: {text}")
    finally:
        await bus.close()


def check_stores(config: RunConfig) -> None:
    """Check that the buckets of the run and of its regions serve us.

    Raises:
        ConfigError: One does not; the text names the field, the bucket and the operation.

    """
    check_store(config.store, "store")
    for region in config.regions:
        if section := region.store_section():
            check_store(section, f"regions.{region.name}")


async def answer_as_launcher(_message: Message) -> AsyncIterator[Message]:
    """Serve LAUNCHER: the answer says that a launcher is up."""
    yield Ack()


async def check_alone(bus: Bus) -> None:
    """Check that no other launcher of this run answers, on any host.

    Raises:
        BusError: One does.

    """
    if await _answers(bus):
        raise BusError(f"run {bus.run_id}: a launcher is running it on another host")


async def _answers(bus: Bus) -> bool:
    with contextlib.suppress(DeadlineError):
        await bus.request(LAUNCHER, Ack(), deadline_s=ANSWER_S)
        return True
    return False


async def has_launcher(run: RunDir, bus: Bus) -> bool:
    """Return whether a run is up and its launcher alive; one that was killed closed nothing."""
    return await is_up(run, bus) and (run.access() is None or await _answers(bus))


async def is_up(run: RunDir, bus: Bus) -> bool:
    """Return whether a run is open: by its launcher's process, or by the log of its servers."""
    if run.access() is None:
        return run.read_state() is not None
    return await _open_at(bus) is not None


async def until_open(bus: Bus, wait_s: float = START_S_MAX) -> int | None:
    """Wait until a launcher is up; return the sequence of its `RunOpened`, None for a complete run.

    Raises:
        DeadlineError: None came in time.

    """
    try:
        async with asyncio.timeout(wait_s):
            while True:
                if (sequence := await _open_at(bus)) is not None or await _is_complete(bus):
                    return sequence
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise DeadlineError(f"run {bus.run_id}: no launcher came up within {wait_s:g} s") from error


async def until_closed(bus: Bus, after: int) -> bool:
    """Wait until the launcher that came up at a sequence stops; return if the run is complete.

    A launcher that dies says nothing: the actors go on, and its next start finds them at work.
    """
    async with contextlib.aclosing(bus.follow([RunClosed], after={Stream.CONTROL: after})) as log:
        async for delivery in log:
            assert isinstance(delivery.event, RunClosed)
            return delivery.event.is_complete
    return False


async def _open_at(bus: Bus) -> int | None:
    """Return the sequence at which the newest launcher came up; None if it has stopped since."""
    opened, closed = await _last(bus, RunOpened), await _last(bus, RunClosed)
    if opened is None or (closed is not None and closed.sequence > opened.sequence):
        return None
    return opened.sequence


async def _is_complete(bus: Bus) -> bool:
    closed = await _last(bus, RunClosed)
    return closed is not None and isinstance(closed.event, RunClosed) and closed.event.is_complete


async def until_silent(bus: Bus) -> None:
    """Wait until no actor reports any more, on any host; give up after STOP_S_MAX."""
    now = asyncio.get_running_loop().time
    newest, heard_at, give_up_at = -1, now(), now() + STOP_S_MAX
    while now() < min(heard_at + SILENT_S, give_up_at):
        report = await bus.last(ActorReported)
        if report is not None and report.sequence != newest:
            newest, heard_at = report.sequence, now()
        await asyncio.sleep(POLL_S)
