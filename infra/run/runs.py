"""Folder of a run on disk, its disk space, its vault, and connections to its event log.

```
runs/<run_id>/
  config.toml   as given, overrides applied    gateway_key   bearer key of the gateway, 0600
  service.toml  configuration that `penstock serve` derives from config.toml
  state.json    embedded server, launcher pid  summary.json  closing metrics
  asyncapi.json subjects and messages, for programs in any language
  events/       nats-server's own store        report.html   the live page, frozen
  objects/      claim checks: weights, checkpoints, tasks, tokenizer
  regions/<r>/  each region's weights          logs/<process>.log
  master_key    0600
  machines/<h>/ each host's saved machines, until the run is complete
  gateway_spool/  records of replies that wait for the log
  tinker_url    where the `tinker` SDK reaches the run
  rollouts_key, rollouts_url  where outside programs take rollouts, and their key, 0600
  in_progress/<process>  items in progress, read by the launcher after a death
  identities/<process>  its user and password on the embedded server, 0600
```

The vault holds the content keys of users in the object store, wrapped by a master key in a file.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import AsyncGenerator, Generator, Iterable
from pathlib import Path
from typing import Any

import msgspec

from penstock.actors.runtime.files import (
    create_secret,
    open_private,
    private_folder,
    read_secret,
    write_atomic,
)
from penstock.actors.runtime.vault import Vault
from penstock.infra.bus.jetstream.access import Access, open_access
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.jetstream.connection import JetStreamError
from penstock.infra.bus.jetstream.puller import STREAM_NOT_FOUND
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.bus.settings import BusSection
from penstock.infra.config.regions import RegionPlace, region_of
from penstock.infra.stores.lazy import LazyJetStreamStore
from penstock.infra.stores.open import open_store, read_file, read_section
from penstock.infra.stores.settings import StoreSection
from penstock.messages.base import FORMAT, check_format
from penstock.messages.bus import Bus, ObjectStore
from penstock.messages.control import RunStarted
from penstock.messages.errors import (
    BusError,
    CodecError,
    ConfigError,
    CorruptDataError,
    NotFoundError,
    PenstockError,
)
from penstock.messages.reading.parsing import parse_json


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `state.json`, which other processes read while the run is up."""

    run_id: str
    url: str
    """Address of the embedded server; empty if `[bus]` names servers."""
    pid: int
    """Process id of the launcher; 0 after an orderly end."""
    started_at: float
    regions: dict[str, RegionPlace] = {}
    """Places of regions that reach the server through a separate network."""
    format: int = 1
    """Format version of the folder; 0.1.0 recorded none."""
    is_service: bool = False
    """Whether `penstock serve` runs it, configured by `service.toml`."""

    def place(self, specs: Iterable[str]) -> RegionPlace:
        """Return where a process of these roles (`role` or `role:region`) belongs."""
        return self.regions.get(region_of(specs), RegionPlace(url=self.url))


class RunDir:
    """Folder of one run: its paths, state, lock and object store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.name
        self.config = path / "config.toml"
        self.service = path / "service.toml"
        self.state = path / "state.json"
        self.asyncapi = path / "asyncapi.json"
        self.events = path / "events"
        self.objects = path / "objects"
        self.regions = path / "regions"
        self.machines = path / "machines"
        self.logs = path / "logs"
        self.in_progress = path / "in_progress"
        self.identities = path / "identities"
        self.summary = path / "summary.json"
        self.report = path / "report.html"
        self.audit = path / "audit.json"
        self.gateway_key = path / "gateway_key"
        self.gateway_url = path / "gateway_url"
        self.tinker_url = path / "tinker_url"
        self.gateway_spool = path / "gateway_spool"
        self.rollouts_key = path / "rollouts_key"
        self.rollouts_url = path / "rollouts_url"
        self.where: str | Access = ""
        """Server of the run; takes precedence over `state.json`."""
        self._store: ObjectStore | None = None

    def gateway_url_of(self, name: str) -> Path:
        """Return the file with the address of `gateway:NAME`, or without a name of any gateway."""
        return self.path / f"gateway_url.{name}" if name else self.gateway_url

    def page_url_of(self, name: str) -> Path:
        """Return the file with a gateway's next link to the live page, which opens it once."""
        return self.path / f"page_url.{name}" if name else self.path / "page_url"

    def store(self) -> ObjectStore:
        """Return the object store of the run, as configured in `[store]`.

        Raises:
            ConfigError: `[store]` is wrong, or its kind needs an extra that is not installed.

        """
        if self._store is None:
            self._store = open_store(self.config, self.objects, self.run_id, self._server)
        return self._store

    async def close_store(self) -> None:
        """Disconnect from the object store if it holds a connection."""
        if isinstance(self._store, LazyJetStreamStore):
            await self._store.close()

    def access(self) -> Access | None:
        """Return the access to the servers of `[bus]`, or None for an embedded server.

        Raises:
            ConfigError: `[bus]` or a file that it names is wrong.

        """
        section = self.bus_section()
        return open_access(section) if section.servers else None

    def bus_section(self) -> BusSection:
        """Return the table `[bus]` of the configuration; raises like `access`."""
        return read_section(read_file(self.config), str(self.config), "bus", BusSection)

    def _server(self) -> str | Access:
        if where := self.where or self.access():
            return where
        state = self.read_state()
        if state is None:
            raise BusError(f"run {self.run_id}: its objects are on its server, which is down")
        return state.url

    def read_state(self) -> RunState | None:
        """Return the state of a run that is up, or None."""
        try:
            state = parse_json(self.state.read_bytes(), RunState, str(self.state))
        except FileNotFoundError:
            return None
        return state if state.pid and _is_alive(state.pid) else None

    @property
    def config_in_use(self) -> Path:
        """Configuration file that the processes of the run use at present."""
        state = self.read_state()
        return self.service if state is not None and state.is_service else self.config

    def write_state(
        self,
        url: str,
        regions: dict[str, RegionPlace] | None = None,
        *,
        is_service: bool = False,
    ) -> None:
        """Write `state.json`, which includes the token of the server, for this user only."""
        state = RunState(
            run_id=self.run_id,
            url=url,
            pid=os.getpid(),
            started_at=time.time(),
            regions=regions or {},
            format=FORMAT,
            is_service=is_service,
        )
        write_atomic(self.state, msgspec.json.encode(state), mode=0o600)

    def end_state(self) -> None:
        """Mark the run as ended in `state.json`, if this process is its launcher."""
        # Best effort: a full disk must not hide the error that ended the run.
        with contextlib.suppress(OSError, CodecError):
            state = parse_json(self.state.read_bytes(), RunState, str(self.state))
            if state.pid == os.getpid():
                ended = msgspec.structs.replace(state, url="", pid=0, regions={})
                write_atomic(self.state, msgspec.json.encode(ended), mode=0o600)

    @contextlib.contextmanager
    def lock(self) -> Generator[None]:
        """Hold the run exclusively while the block runs.

        Raises:
            BusError: Another process holds the run.

        """
        private_folder(self.path)
        self.path.chmod(0o700)
        with open_private(self.path / "lock", "wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BusError(f"run {self.run_id}: another process is running it") from error
            yield


def find_run(name: str, root: Path, *, any_format: bool = False) -> RunDir:
    """Return the run with this id or path; `latest` is the newest.

    Raises:
        NotFoundError: The run does not exist; the text lists the newest ones.
        FormatError: Its folder has another format version, unless `any_format` accepts it.
        CorruptDataError: Its `state.json` is damaged.
        ConfigError: The folder was renamed; its log is stored under the run's id.

    """
    run = _find(name, root)
    if not any_format and run.state.exists():
        try:
            state = parse_json(run.state.read_bytes(), dict[str, Any], "state")
        except ValueError as error:
            raise CorruptDataError(
                f"{run.state}: {error}: delete it; it only says which server is up"
            ) from error
        check_format(state.get("format", 1), f"run {run.run_id}")
        if (run_id := state.get("run_id", run.run_id)) != run.run_id:
            raise ConfigError(
                f"run {run.run_id}: its log is that of run {run_id}: name the folder {run_id} again"
            )
    return run


def _find(name: str, root: Path) -> RunDir:
    known = sorted((p.parent for p in root.glob("*/config.toml")), key=lambda p: p.stat().st_mtime)
    if name == "latest" and known:
        return RunDir(known[-1])
    for path in (Path(name), root / name):
        if (path / "config.toml").exists():
            return RunDir(path.resolve())
    choices = ", ".join(p.name for p in known[-5:]) or "none yet"
    raise NotFoundError(f"run {name!r}: not found under {root}/; the newest are: {choices}")


@contextlib.asynccontextmanager
async def connect(run: RunDir, where: str | Access, name: str) -> AsyncGenerator[NatsBus]:
    """Connect to the log and the objects of a run."""
    run.where = where
    names, inline = {"run_id": run.run_id, "name": name}, run.bus_section().inline_bytes
    bus = await NatsBus.connect(where, **names, store=run.store(), inline_bytes=inline)
    try:
        yield bus
    finally:
        # The bus first: iterators and services that it stops may still use the store.
        await bus.close()
        await run.close_store()


@contextlib.asynccontextmanager
async def open_log(run: RunDir, name: str, *, any_format: bool = False) -> AsyncGenerator[NatsBus]:
    """Connect to the log of a run; start its embedded server for the reading if it is down.

    Raises:
        NotFoundError: The servers that `[bus]` names have no log of this run.
        FormatError: The log has another format version, unless `any_format` accepts it.

    """
    async with _connected(run, name) as bus:
        if not any_format:
            await check_log(bus)
        yield bus


async def check_log(bus: Bus) -> None:
    """Refuse a log whose `RunStarted` records another format version.

    Raises:
        FormatError: The format version differs.

    """
    if started := await bus.last(RunStarted):
        assert isinstance(started.event, RunStarted)
        check_format(started.event.format, f"the log of run {bus.run_id}")


@contextlib.asynccontextmanager
async def _connected(run: RunDir, name: str) -> AsyncGenerator[NatsBus]:
    if access := run.access():
        async with connect(run, access, name) as bus:
            await _check_held(bus, access)
            yield bus
        return
    state = run.read_state()
    if state is not None:
        async with connect(run, state.url, name) as bus:
            yield bus
        return
    with run.lock():
        server = EmbeddedServer(store_dir=run.events)
        await server.start()
        try:
            async with connect(run, server.url, name) as bus:
                # In-memory streams ended with the last server.
                await bus.provision()
                yield bus
        finally:
            await server.stop()


async def _check_held(bus: NatsBus, access: Access) -> None:
    try:
        started = await bus.last(RunStarted)
    except JetStreamError as error:
        if error.code != STREAM_NOT_FOUND:
            raise
        started = None
    if started is None:
        raise NotFoundError(f"run {bus.run_id}: {access.place} has no log of it")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def open_vault(run: RunDir) -> Vault:
    """Return the vault of a run; raises like `master_key`."""
    return Vault(run.store(), master_key(run))


def master_key(run: RunDir) -> bytes:
    """Return the secret that wraps content keys and derives pseudonyms, the same on every host.

    Raises:
        ConfigError: `[store]` or the file that it names is wrong.

    """
    path = master_key_file(run)
    if path == run.path / "master_key":
        return create_secret(path)
    try:
        return read_secret(path)
    except ConfigError as error:
        raise ConfigError(f"store.master_key_file: {error}") from error


def master_key_file(run: RunDir) -> Path:
    """Return the file of `master_key`; raises ConfigError if `[store]` is wrong."""
    section = read_section(read_file(run.config), str(run.config), "store", StoreSection)
    return Path(section.master_key_file) if section.master_key_file else run.path / "master_key"


DISK_FREE_MIB_MIN = 32
"""Free MiB below which a run stops in order, before a write fails halfway."""


class DiskFullError(PenstockError, OSError):
    """The file system of the run is full; the text names the folder."""


def remove_needless(run_dir: RunDir, elsewhere: str) -> None:
    """Remove what a complete run no longer needs: saved machines.

    Args:
        elsewhere: Value of `sandbox_host.checkpoints`, where hosts save machines if set.

    """
    machines = Path(elsewhere) / run_dir.run_id if elsewhere else run_dir.machines
    shutil.rmtree(machines, ignore_errors=True)


def check_space(folder: Path) -> None:
    """Check the free space of the file system of a run.

    Raises:
        DiskFullError: Less than DISK_FREE_MIB_MIN is free.

    """
    free_mib = shutil.disk_usage(folder).free >> 20
    if free_mib < DISK_FREE_MIB_MIN:
        text = f"{folder}: {free_mib} MiB free of the {DISK_FREE_MIB_MIN} MiB that a run keeps free"
        raise DiskFullError(f"{text}; free space, then: penstock run --resume {folder.name}")
