"""Where a run lives on disk, and how to reach its event log.

```
runs/<run_id>/
  config.toml   as given, overrides applied    gateway_key   bearer key of the gateway, 0600
  service.toml  what `penstock serve` makes of config.toml, while it serves
  state.json    embedded server, launcher pid  summary.json  closing figures
  asyncapi.json its subjects and messages, for programs in any language
  events/       nats-server's own store        report.html   the live page, frozen
  objects/      claim checks: weights, checkpoints, tasks, tokenizer
  regions/<r>/  each region's weights          logs/<process>.log
  handover/     the newest weights, for publishing ranks, until complete;  master_key  0600
  machines/<h>/ each host's saved machines, until the run is complete
  gateway_spool/  records of replies that wait for the log
  in_progress/<process>  what each process works on, for the launcher that finds it dead
```

A run's vault: users' content keys in its store, under a master key that is in a file.

The disk that a run takes: what must be free, and what is removed at its end.
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
from penstock.infra.run.regions import RegionPlace, region_of
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
    """Address of the embedded server; empty: servers that `[bus]` names."""
    pid: int
    """Process id of the launcher; 0: it ended in order."""
    started_at: float
    regions: dict[str, RegionPlace] = {}
    """Regions behind a link."""
    format: int = 1
    """Format version of the folder; 0.1.0 recorded none."""
    is_service: bool = False
    """Whether `penstock serve` runs it, by `service.toml`."""

    def place(self, specs: Iterable[str]) -> RegionPlace:
        """Return where a process of these roles (`role` or `role:region`) belongs."""
        return self.regions.get(region_of(specs), RegionPlace(url=self.url))


class RunDir:
    """Paths of one run."""

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
        self.handover = path / "handover"
        self.logs = path / "logs"
        self.in_progress = path / "in_progress"
        self.summary = path / "summary.json"
        self.report = path / "report.html"
        self.audit = path / "audit.json"
        self.gateway_key = path / "gateway_key"
        self.gateway_url = path / "gateway_url"
        self.gateway_spool = path / "gateway_spool"
        self.where: str | Access = ""
        """Server of the run; takes precedence over `state.json`."""
        self._store: ObjectStore | None = None

    def gateway_url_of(self, name: str) -> Path:
        """Return the file with the address of `gateway:NAME`; that of any is in `gateway_url`."""
        return self.path / f"gateway_url.{name}" if name else self.gateway_url

    def store(self) -> ObjectStore:
        """Return the run's object store, as `[store]` of its configuration says.

        Raises:
            ConfigError: `[store]` is wrong, or its kind needs an extra that is not installed.

        """
        if self._store is None:
            self._store = open_store(self.config, self.objects, self.run_id, self._server)
        return self._store

    async def close_store(self) -> None:
        """Disconnect from the object store, if it is one that connects."""
        if isinstance(self._store, LazyJetStreamStore):
            await self._store.close()

    def access(self) -> Access | None:
        """Return how to reach the servers that `[bus]` of its configuration names, if any.

        Raises:
            ConfigError: `[bus]` is wrong, or a file that it names.

        """
        section = self.bus_section()
        return open_access(section) if section.servers else None

    def bus_section(self) -> BusSection:
        """Return `[bus]` of its configuration; raises as `access` does."""
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
        """The configuration of the processes of a run that is up."""
        state = self.read_state()
        return self.service if state is not None and state.is_service else self.config

    def write_state(
        self,
        url: str,
        regions: dict[str, RegionPlace] | None = None,
        *,
        is_service: bool = False,
    ) -> None:
        """Write `state.json` for other processes of this user, with the servers' token."""
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
        """Say that the run is down, if it can be: this process may live on without it."""
        with contextlib.suppress(OSError, CodecError):
            state = parse_json(self.state.read_bytes(), RunState, str(self.state))
            if state.pid == os.getpid():
                ended = msgspec.structs.replace(state, url="", pid=0, regions={})
                write_atomic(self.state, msgspec.json.encode(ended), mode=0o600)

    @contextlib.contextmanager
    def lock(self) -> Generator[None]:
        """Hold the run exclusively.

        Raises:
            BusError: Another launcher has it.

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
    """Return the run of that id or path; `latest` is the newest.

    Raises:
        NotFoundError: No such run; the text lists the newest ones.
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
    """Connect to the run's log and objects on a server."""
    run.where = where
    names, inline = {"run_id": run.run_id, "name": name}, run.bus_section().inline_bytes
    bus = await NatsBus.connect(where, **names, store=run.store(), inline_bytes=inline)
    try:
        yield bus
    finally:
        await bus.close()  # First: what it ends may use the store.
        await run.close_store()


@contextlib.asynccontextmanager
async def open_log(run: RunDir, name: str, *, any_format: bool = False) -> AsyncGenerator[NatsBus]:
    """Connect to a run's log: to its servers, or to an embedded one started for the reading.

    Raises:
        NotFoundError: The servers that `[bus]` names have no log of this run.
        FormatError: The log has another format version, unless `any_format` accepts it.

    """
    async with _connected(run, name) as bus:
        if not any_format:
            await check_log(bus)
        yield bus


async def check_log(bus: Bus) -> None:
    """Refuse a log of another format version, as its `RunStarted` records it.

    Raises:
        FormatError: It has another.

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
                await bus.provision()  # The streams kept in memory went with the last server.
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
    """Return the vault; raises as `master_key` does."""
    return Vault(run.store(), master_key(run))


def master_key(run: RunDir) -> bytes:
    """Return the secret that wraps content keys and makes pseudonyms, the same on every host.

    Raises:
        ConfigError: `[store]` is wrong, or the file that it names.

    """
    section = read_section(read_file(run.config), str(run.config), "store", StoreSection)
    if not section.master_key_file:
        return create_secret(run.path / "master_key")
    try:
        return read_secret(Path(section.master_key_file))
    except ConfigError as error:
        raise ConfigError(f"store.master_key_file: {error}") from error


DISK_FREE_MIB_MIN = 32
"""Below this a run stops in order, before a write fails halfway."""


class DiskFullError(PenstockError, OSError):
    """The run's file system has no room left; the text names the folder."""


def remove_needless(run_dir: RunDir, elsewhere: str) -> None:
    """Remove what a complete run no longer needs: saved machines and handed-over weights.

    Args:
        run_dir: the run's.
        elsewhere: `sandbox_host.checkpoints`, where hosts save if it is given.

    """
    machines = Path(elsewhere) / run_dir.run_id if elsewhere else run_dir.machines
    for folder in (machines, run_dir.handover):
        shutil.rmtree(folder, ignore_errors=True)


def check_space(folder: Path) -> None:
    """Check the free space of a run's file system.

    Raises:
        DiskFullError: Too little is left.

    """
    free_mib = shutil.disk_usage(folder).free >> 20
    if free_mib < DISK_FREE_MIB_MIN:
        text = f"{folder}: {free_mib} MiB free of the {DISK_FREE_MIB_MIN} MiB that a run keeps free"
        raise DiskFullError(f"{text}; free space, then: penstock run --resume {folder.name}")
