"""Backup and restore of a run, and its move to other servers.

A backup is a folder: `backup.json`, and the files that it lists with their digests.

```
 run/       configuration, keys and spools of the run's folder
 objects/   one file for each object, by key
 streams/   <stream>.json and <stream>.chunks, as the server stores it (`streams.py`)
```
The run may be up meanwhile. References are copied before their targets, so that a restored run
lacks nothing that it refers to: checkpoints and snapshots, then streams, then the rest.
"""

import asyncio
import contextlib
import shutil
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path

import msgspec
import tomli_w
import xxhash

from penstock.actors.runtime.files import open_private, private_folder, write_atomic
from penstock.actors.runtime.snapshots.stored import SNAPSHOT_PREFIX
from penstock.infra.backup.streams import StreamCopy, copy_in, copy_out
from penstock.infra.bus.archive.reading import ARCHIVED
from penstock.infra.bus.jetstream.access import open_access
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.jetstream.connection import NatsConnection
from penstock.infra.bus.jetstream.provision import provision
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.bus.settings import BusSection
from penstock.infra.run.runs import RunDir
from penstock.infra.stores.keys import check_key
from penstock.infra.stores.open import read_file, read_section
from penstock.messages.base import FORMAT, Stream, check_format
from penstock.messages.bus import ObjectStore
from penstock.messages.control import LogArchived
from penstock.messages.errors import BusError, CorruptDataError, NotFoundError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.streams import check_run_id

_OWN_FILES = ("config.toml", "service.toml", "master_key", "gateway_key")
_OWN_FOLDERS = ("gateway_spool",)
_FIRST = ("checkpoints/", "checkpoint-pieces/", SNAPSHOT_PREFIX)
"""Objects that stand for a position of the log: copied before it, so they are never ahead of it."""
_ORDER = (
    Stream.TASKS, Stream.CREDITS, Stream.TINKER, Stream.TRAINING, Stream.WEIGHTS, Stream.REWARDS,
    Stream.CONTROL, Stream.SIGNALS, Stream.FEEDBACK, Stream.TRAJECTORIES, Stream.DLQ,
)  # fmt: skip
"""What names events of other streams comes before these."""
_LENGTH = struct.Struct("<I")


class BackupHead(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `backup.json`."""

    format: int
    run_id: str
    at: float
    """Unix seconds at which the backup began."""
    digests: dict[str, str]
    """File -> xxh3-128 of its bytes."""


class _Format(msgspec.Struct):
    format: int = 0


async def back_up(run: RunDir, bus: NatsBus, target: Path) -> BackupHead:
    """Copy a run into a new folder, which appears when it is complete.

    Args:
        run: The run; it may be up.
        bus: Its log.
        target: The folder.

    Raises:
        FileExistsError: The target exists.
        BusError: The log cannot be read, or was archived meanwhile; retry.

    """
    _check_absent(target)
    partial, started_at = target.with_name(f".{target.name}.partial"), time.time()
    shutil.rmtree(partial, ignore_errors=True)
    private_folder(partial)
    store = run.store()
    await _copy_objects(store, partial, lambda key: key.startswith(_FIRST))
    ends = {stream: await _archived_to(bus, stream) for stream in ARCHIVED}
    connection = await NatsConnection.connect(bus.access, "backup")
    try:
        for stream in _ORDER:
            await _copy_stream(connection, stream, partial / "streams")
    finally:
        await connection.close()
    for stream, end in ends.items():
        state, _ = await bus.stream_state(stream)
        is_purged = int(state["first_seq"]) > end + 1
        if is_purged and await _archived_to(bus, stream) > end:
            raise BusError(f"{stream} was archived during the backup: try again")
    await _copy_objects(store, partial, lambda key: not key.startswith(_FIRST))
    _copy_own(run, partial / "run")
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    digests = {str(path.relative_to(partial)): _digest(path) for path in files}
    head = BackupHead(format=FORMAT, run_id=run.run_id, at=started_at, digests=digests)
    write_atomic(partial / "backup.json", msgspec.json.encode(head))
    partial.replace(target)
    return head


async def restore(folder: Path, runs_dir: Path) -> RunDir:
    """Restore the run of a backup, on an embedded server or on those of its `[bus]`.

    Raises:
        FileExistsError: A run with that id exists.
        CorruptDataError: A file is damaged or missing; nothing is created.
        FormatError: The backup has another format.
        BusError: The servers already have such streams.

    """
    head = _checked_head(folder)
    target = RunDir(runs_dir / head.run_id)
    _check_absent(target.path)
    made = RunDir(runs_dir / f".restore-{head.run_id}" / head.run_id)
    shutil.rmtree(made.path.parent, ignore_errors=True)
    private_folder(made.path.parent)
    shutil.copytree(folder / "run", made.path)
    async with _servers(made) as connection:
        num_replicas = made.bus_section().num_replicas
        for stream in _ORDER:
            if (folder / "streams" / f"{stream}.json").exists():
                copy, chunks = _stored_stream(folder / "streams", stream)
                await copy_in(connection, copy, chunks, num_replicas=num_replicas)
        await provision(connection)
        store = made.store()
        for path in sorted((folder / "objects").rglob("*")):
            if path.is_file():
                key = check_key(str(path.relative_to(folder / "objects")))
                await store.put(key, await asyncio.to_thread(path.read_bytes))
        await made.close_store()
    made.path.replace(target.path)
    made.path.parent.rmdir()
    return target


async def move_to_servers(run: RunDir, file: Path) -> None:
    """Move the log of a stopped run from its embedded server to those in `[bus]` of a file.

    The former log stays in `events-before-move`.

    Raises:
        BusError: The run is up or already on external servers, or the target has its streams.
        ConfigError: `[bus]` is invalid.

    """
    section = read_section(read_file(file), str(file), "bus", BusSection)
    if run.access() is not None or not section.servers:
        raise BusError(f"run {run.run_id}: expected an embedded server, and bus.servers in {file}")
    with run.lock():
        source = EmbeddedServer(store_dir=run.events)
        await source.start()
        here = await NatsConnection.connect(source.url, "move")
        there = await NatsConnection.connect(open_access(section), "move")
        try:
            for stream in _ORDER:
                found = await copy_out(here, stream)
                if found is not None:
                    copy, chunks = found
                    await copy_in(there, copy, chunks, num_replicas=section.num_replicas)
            await provision(there)
        finally:
            await there.close()
            await here.close()
            await source.stop()
        given = {name: value for name, value in msgspec.to_builtins(section).items() if value}
        for path in (run.config, run.service):
            if path.exists():
                write_atomic(path, tomli_w.dumps(read_file(path) | {"bus": given}).encode())
        run.events.replace(run.path / "events-before-move")


async def _copy_objects(store: ObjectStore, folder: Path, wanted: Callable[[str], bool]) -> None:
    for key in await store.keys(""):
        if not wanted(key):
            continue
        # Nothing that is copied later refers to an object that is deleted by now.
        with contextlib.suppress(NotFoundError):
            data = await store.get(key)
            await asyncio.to_thread(_write, folder / "objects" / check_key(key), data)


def _check_absent(path: Path) -> None:
    if path.exists():
        raise FileExistsError(f"{path}: exists; move it away")


def _write(path: Path, data: bytes) -> None:
    private_folder(path.parent)
    with open_private(path, "wb") as file:
        file.write(data)


async def _copy_stream(connection: NatsConnection, stream: Stream, folder: Path) -> None:
    found = await copy_out(connection, stream)
    if found is None:
        return
    copy, chunks = found
    private_folder(folder)
    with open_private(folder / f"{stream}.chunks", "wb") as file:
        async for chunk in chunks:
            file.write(_LENGTH.pack(len(chunk)) + chunk)
    write_atomic(folder / f"{stream}.json", msgspec.json.encode(copy))


def _stored_stream(folder: Path, stream: Stream) -> tuple[StreamCopy, AsyncIterator[bytes]]:
    path = folder / f"{stream}.json"
    copy = parse_json(path.read_bytes(), StreamCopy, str(path))

    async def chunks() -> AsyncIterator[bytes]:
        with (folder / f"{stream}.chunks").open("rb") as file:
            while head := file.read(_LENGTH.size):
                yield file.read(_LENGTH.unpack(head)[0])

    return copy, chunks()


def _copy_own(run: RunDir, folder: Path) -> None:
    private_folder(folder)
    for name in _OWN_FILES:
        if (run.path / name).exists():
            _write(folder / name, (run.path / name).read_bytes())
    for name in _OWN_FOLDERS:
        if (run.path / name).is_dir():
            shutil.copytree(run.path / name, folder / name)


def _checked_head(folder: Path) -> BackupHead:
    path = folder / "backup.json"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NotFoundError(f"{path}: {error.strerror}: expected a backup") from error
    check_format(parse_json(data, _Format, str(path)).format, str(path))
    head = parse_json(data, BackupHead, str(path))
    check_run_id(head.run_id)
    for name, digest in head.digests.items():
        file = folder / name
        if not file.resolve().is_relative_to(folder.resolve()) or not file.is_file():
            raise CorruptDataError(f"{file}: missing from the backup")
        if _digest(file) != digest:
            raise CorruptDataError(f"{file}: the bytes do not match the backup's digest")
    return head


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()


async def _archived_to(bus: NatsBus, stream: Stream) -> int:
    found = await bus.last(LogArchived, f"archive.{stream}")
    return found.event.last if found and isinstance(found.event, LogArchived) else 0


@contextlib.asynccontextmanager
async def _servers(run: RunDir) -> AsyncGenerator[NatsConnection]:
    """Yield a connection to the servers of a run whose streams do not exist yet."""
    async with contextlib.AsyncExitStack() as stack:
        access = run.access()
        if access is None:
            server = EmbeddedServer(store_dir=run.events)
            await server.start()
            stack.push_async_callback(server.stop)
            run.where = server.url
        connection = await NatsConnection.connect(access or run.where, "restore")
        stack.push_async_callback(connection.close)
        yield connection
