"""A NATS cluster of three servers on the loopback device, for tests."""

import asyncio
import json
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import nats
import nats.errors

from penstock.infra.bus.server.server import MAX_PAYLOAD_BYTES, find_server

READY_S_MAX = 60.0


def free_ports(num: int) -> list[int]:
    """Return distinct ports that are free now."""
    sockets = [socket.socket() for _ in range(num)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class NatsCluster:
    """Servers `n0`, `n1`, ...; each can be killed and started again on its port and store."""

    def __init__(self, folder: Path, num_servers: int = 3, options: str = "") -> None:
        """Args: `options` is appended to the configuration of every server."""
        self.folder = folder
        self.options = options
        self.token: str | None = None
        self.ports = free_ports(num_servers)
        self._routes = free_ports(num_servers)
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * num_servers

    @property
    def servers(self) -> list[str]:
        """Addresses as in `[bus] servers`."""
        return [f"nats://127.0.0.1:{port}" for port in self.ports]

    def start(self, index: int) -> None:
        """Start one server, on the store that it had."""
        routes = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in self._routes)
        own = self.folder / f"n{index}"
        own.mkdir(parents=True, exist_ok=True)
        (own / "nats.conf").write_text(
            f'server_name: n{index}\nlisten: "127.0.0.1:{self.ports[index]}"\n'
            f"max_payload: {MAX_PAYLOAD_BYTES}\nmax_pending: {256 << 20}\n"
            f'jetstream {{ store_dir: "{own}", sync_interval: always,'
            f" max_memory_store: {256 << 20}, max_file_store: {1 << 40} }}\n"
            f'cluster {{ name: c, listen: "127.0.0.1:{self._routes[index]}",'
            f" routes: [{routes}] }}\n{self.options}\n"
        )
        with (own / "nats.log").open("ab") as log:
            self.processes[index] = subprocess.Popen(
                [str(find_server()), "-c", str(own / "nats.conf")], stdout=log, stderr=log
            )

    def kill(self, index: int) -> None:
        """kill -9 one server."""
        process = self.processes[index]
        assert process is not None
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """Kill what runs."""
        for index, process in enumerate(self.processes):
            if process is not None and process.poll() is None:
                self.kill(index)

    async def start_all(self) -> None:
        """Start every server and wait until JetStream serves."""
        for index in range(len(self.ports)):
            self.start(index)
        await self.until_ready()

    async def until_ready(self) -> None:
        """Wait until every running server answers for JetStream."""
        async with asyncio.timeout(READY_S_MAX):
            for index, process in enumerate(self.processes):
                while process is not None and process.poll() is None:
                    try:
                        info = await self.ask(index, "$JS.API.INFO")
                    except (OSError, nats.errors.Error, TimeoutError):
                        info = {"error": "away"}
                    if "error" not in info:
                        break
                    await asyncio.sleep(0.1)

    async def ask(self, index: int, subject: str, body: bytes = b"") -> dict[str, Any]:
        """Ask one server something."""
        client = await nats.connect(
            self.servers[index],
            token=self.token,
            connect_timeout=2,
            allow_reconnect=False,
            max_reconnect_attempts=1,
        )
        try:
            return json.loads((await client.request(subject, body, timeout=2)).data)
        finally:
            await client.close()

    async def leader(self, stream: str) -> int:
        """Return the index of the server that leads a stream, as soon as one does."""
        async with asyncio.timeout(READY_S_MAX):
            while True:
                for index, process in enumerate(self.processes):
                    if process is None or process.poll() is not None:
                        continue
                    try:
                        info = await self.ask(index, f"$JS.API.STREAM.INFO.{stream}")
                    except (OSError, nats.errors.Error, TimeoutError):
                        continue
                    name = info.get("cluster", {}).get("leader", "")
                    if name and self.is_up(int(name[1:])):
                        return int(name[1:])
                await asyncio.sleep(0.1)

    def is_up(self, index: int) -> bool:
        """Return whether a server runs."""
        process = self.processes[index]
        return process is not None and process.poll() is None
