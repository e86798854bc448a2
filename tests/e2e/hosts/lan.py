"""Hosts for tests: a network namespace and a folder each, joined by a bridge."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from penstock.infra.bus.server.server import MAX_PAYLOAD_BYTES, find_server
from penstock.infra.orphans import die_with_parent

NATS_PORT, CLUSTER_PORT, S3_PORT = 4222, 6222, 9000
RESTART_S = 0.5
CREDENTIALS = {
    f"AWS_{name}": "us-east-1" for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION")
}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Lan:
    """Namespaces on one bridge, which is in a namespace of its own."""

    def __init__(self, number: int) -> None:
        """Args: `number` distinguishes networks of one machine."""
        self._name = f"pslan{number}"
        self._prefix = f"10.214.{number}"
        self._hosts: dict[str, int] = {}

    def open(self) -> None:
        """Make the bridge."""
        ip("netns", "add", self._name)
        ip("-n", self._name, "link", "add", "br0", "type", "bridge")
        ip("-n", self._name, "link", "set", "br0", "up")

    def address(self, host: str) -> str:
        """Return a host's address; the same after it was removed and added again."""
        return f"{self._prefix}.{self._hosts.setdefault(host, len(self._hosts) + 1)}"

    def namespace(self, host: str) -> str:
        return f"{self._name}-{host}"

    def add(self, host: str) -> None:
        """Plug a host in."""
        own, address = self.namespace(host), self.address(host)
        ip("netns", "add", own)
        peer = f"p{self._hosts[host]}"
        ip("-n", self._name, "link", "add", peer, "type", "veth", "peer", "eth0", "netns", own)
        ip("-n", self._name, "link", "set", peer, "master", "br0", "up")
        ip("-n", own, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", own, "link", "set", device, "up")

    def remove(self, host: str) -> None:
        """Cut a host off; what ran in it must be killed."""
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("netns", "del", self.namespace(host))

    def close(self) -> None:
        """Remove all of it."""
        for host in self._hosts:
            self.remove(host)
        self.remove_bridge()

    def remove_bridge(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("netns", "del", self._name)


class Host:
    """One host: programs that run in its namespace, in its folder."""

    def __init__(self, lan: Lan, name: str, root: Path) -> None:
        self.lan, self.name, self.folder = lan, name, root / name
        self.folder.mkdir()
        self._programs: dict[str, tuple[list[str], dict[str, str]]] = {}
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._keepers: dict[str, asyncio.Task[int]] = {}
        lan.add(name)

    @property
    def address(self) -> str:
        return self.lan.address(self.name)

    def command(self, *argv: str) -> list[str]:
        """Return a command line that runs on this host."""
        space = f"--net=/var/run/netns/{self.lan.namespace(self.name)}"
        return ["nsenter", space, f"--wd={self.folder}", "--", *argv]

    def penstock(self, *arguments: str) -> list[str]:
        return self.command(sys.executable, "-m", "penstock.infra.cli", *arguments)

    def keep(
        self,
        name: str,
        argv: list[str],
        *,
        again: bool = True,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Run a program while the host is up; unless told otherwise, again whenever it fails."""
        environment = os.environ | CREDENTIALS if environment is None else environment
        self._programs[name] = argv, environment
        (self.folder / f"{name}.log").touch()
        keeping = self._keep(name, argv, again, environment)
        self._keepers[name] = asyncio.create_task(keeping, name=name)

    async def _keep(
        self, name: str, argv: list[str], again: bool, environment: dict[str, str]
    ) -> int:
        while True:
            with (self.folder / f"{name}.log").open("ab") as log:
                self._running[name] = process = await asyncio.create_subprocess_exec(
                    *argv, stdout=log, stderr=log, env=environment,
                    preexec_fn=die_with_parent, start_new_session=True,
                )  # fmt: skip
            if (code := await process.wait()) == 0 or not again:
                return code
            await asyncio.sleep(RESTART_S)

    def kill(self, name: str) -> None:
        """kill -9 one program, which starts again."""
        self._running[name].send_signal(signal.SIGKILL)

    async def stop(self, name: str) -> int:
        """SIGTERM to one program, which is not started again; return its exit code."""
        self._keepers.pop(name).cancel()
        process = self._running[name]
        process.terminate()
        return await process.wait()

    async def ended(self, name: str) -> int:
        """Wait for the end of a program; return its exit code."""
        return await asyncio.shield(self._keepers[name])

    async def lose(self) -> None:
        """Lose the host: its programs die at once, and its network is gone."""
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        self._keepers.clear()
        listing = ["ip", "netns", "pids", self.lan.namespace(self.name)]
        found = subprocess.run(listing, capture_output=True, text=True, check=False)
        for pid in map(int, found.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.lan.remove(self.name)
        for process in self._running.values():
            await process.wait()

    def replace(self) -> None:
        """Bring it back, with what ran on it."""
        self.lan.add(self.name)
        for name, (argv, environment) in self._programs.items():
            self.keep(name, argv, environment=environment)


def serve_nats(hosts: list[Host], token: str) -> None:
    """Keep a server of one cluster on each host."""
    routes = ", ".join(f'"nats-route://{host.address}:{CLUSTER_PORT}"' for host in hosts)
    for host in hosts:
        (host.folder / "nats.conf").write_text(
            f'server_name: {host.name}\nlisten: "{host.address}:{NATS_PORT}"\n'
            f"max_payload: {MAX_PAYLOAD_BYTES}\nmax_pending: {256 << 20}\n"
            f'authorization {{ token: "{token}" }}\n'
            f'jetstream {{ store_dir: "{host.folder}/js", sync_interval: always,'
            f" max_memory_store: {256 << 20}, max_file_store: {1 << 40} }}\n"
            f'cluster {{ name: c, listen: "{host.address}:{CLUSTER_PORT}", routes: [{routes}] }}\n'
        )
        host.keep("nats", host.command(str(find_server()), "-c", str(host.folder / "nats.conf")))


def serve_s3(host: Host) -> str:
    """Keep an S3 server on a host; return its endpoint."""
    program = str(Path(sys.executable).with_name("moto_server"))
    host.keep("s3", host.command(program, "-H", host.address, "-p", str(S3_PORT)))
    return f"http://{host.address}:{S3_PORT}"
