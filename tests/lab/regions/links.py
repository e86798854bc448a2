"""A region's link as the launcher holds it: which kind, started, and ended."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec
from tests.lab.regions import proxy, tunnel
from tests.lab.regions.settings import LinkSection

from penstock.infra.bus.server import deathsig
from penstock.messages.errors import PenstockError

ROOT = Path(__file__).resolve().parents[3]
"""Links' processes are modules of `tests`, which are found from here."""
START_S_MAX = 60.0
STOP_S_MAX = 5.0


class LinkError(PenstockError, OSError):
    """A region's link could not be made, or broke; the text has its process's error."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A link that is up."""

    hub_address: str
    """host:port of the hub's leaf-node listener, as the region dials it."""
    namespace_pid: int
    """The process that holds the region's namespace; 0 for a proxy."""
    process: asyncio.subprocess.Process

    @property
    def entrance(self) -> list[str]:
        """The start of a command line that runs a program in the region."""
        if not self.namespace_pid:
            return []
        return ["nsenter", f"--net=/proc/{self.namespace_pid}/ns/net", "--"]


class Subnet:
    """IPv4 addresses for one run's tunnels: the hub is .1, the regions follow."""

    def __init__(self, taken: Sequence[str], first: int) -> None:
        """Choose a 10.213.x.0/24 that is not in `taken`, looking from x = `first` on.

        Raises:
            LinkError: all are taken.

        """
        prefixes = [f"10.213.{(first + i) % 256}." for i in range(256)]
        free = [p for p in prefixes if not any(address.startswith(p) for address in taken)]
        if not free:
            raise LinkError("regions: no free network in 10.213.0.0/16")
        self._prefix = free[0]

    @property
    def hub(self) -> str:
        """The hub's address."""
        return f"{self._prefix}1"

    def region(self, index: int) -> str:
        """Return the address of the index-th region."""
        return f"{self._prefix}{index + 2}"

    def device(self, index: int) -> str:
        """Return the name of the hub's device of the index-th region."""
        return f"ps{self._prefix.split('.')[2]}-{index}"


async def free_subnet() -> Subnet:
    """Return addresses that no device of this machine has.

    Raises:
        LinkError: `ip` is missing or fails.

    """
    try:
        listing = await asyncio.create_subprocess_exec(
            "ip", "-json", "address", stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(START_S_MAX):
            output, _ = await listing.communicate()
        devices = json.loads(output)
    except (OSError, ValueError, TimeoutError) as error:
        raise LinkError(f"ip -json address: {error}") from error
    taken = [info["local"] for device in devices for info in device.get("addr_info", [])]
    return Subnet(taken, os.getpid() % 256)


@contextlib.asynccontextmanager
async def open_tunnel(
    subnet: Subnet, index: int, link: LinkSection, hub_port: int
) -> AsyncGenerator[Link]:
    """Make a namespace with a shaped link to it, for as long as the body runs.

    Raises:
        LinkError: not possible here.

    """
    spec = tunnel.Tunnel(
        device=subnet.device(index),
        hub=subnet.hub,
        region=subnet.region(index),
        link=link,
        seed=2 * index,
    )
    async with _process(tunnel.__name__, msgspec.json.encode(spec).decode()) as process:
        yield Link(
            hub_address=f"{subnet.hub}:{hub_port}", namespace_pid=process.pid, process=process
        )


@contextlib.asynccontextmanager
async def open_proxy(index: int, link: LinkSection, hub_port: int) -> AsyncGenerator[Link]:
    """Shape a region's connections, for as long as the body runs.

    Raises:
        LinkError: the proxy did not start.

    """
    spec = proxy.Proxy(port=free_port(), hub_port=hub_port, link=link, seed=2 * index)
    async with _process(proxy.__name__, msgspec.json.encode(spec).decode()) as process:
        yield Link(hub_address=f"127.0.0.1:{spec.port}", namespace_pid=0, process=process)


def free_port() -> int:
    """Return a TCP port that is free on the loopback device."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def _process(module: str, spec: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Run a link's process, which ends with this one at the latest."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", deathsig.__file__, str(os.getpid()),
        sys.executable, "-m", module, spec,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, process_group=0,
        cwd=ROOT,
    )  # fmt: skip
    try:
        await _until_ready(process, module)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)  # It holds nothing that could be lost.
        async with asyncio.timeout(STOP_S_MAX):
            await process.wait()


async def _until_ready(process: asyncio.subprocess.Process, module: str) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(START_S_MAX):
            if await process.stdout.readline():
                return
            said = (await process.stderr.read()).decode(errors="replace").strip()
            await process.wait()
    except TimeoutError as error:
        raise LinkError(f"{module}: not ready within {START_S_MAX:g} s") from error
    raise LinkError(f"{module}: {said.splitlines()[-1] if said else 'ended'}")


_PROGRAMS = {"ip": "iproute2", "nsenter": "util-linux"}
_ANY = LinkSection(bandwidth_mbit_s=1000.0, rtt_ms=0.0)
_INDEX = 200
"""Index of the probe's own region, beyond those of a run."""
HOW_TO_GET = (
    "run as root, with /dev/net/tun (modprobe tun) and: apt-get install iproute2 util-linux"
)


async def probe_namespaces() -> str:
    """Make a link and drop it; return the obstacle, "" if there is none."""
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            return f"`{program}` is not installed (apt-get install {package})"
    try:
        async with open_tunnel(await free_subnet(), _INDEX, _ANY, hub_port=1):
            return ""
    except LinkError as error:
        return f"namespaces are refused: {error}"
