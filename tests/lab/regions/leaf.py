"""A nats-server at the far end of a link: a leaf node of the run's server, without JetStream."""

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

from tests.lab.regions.links import Link, LinkError, free_port

from penstock.actors.runtime.files import open_private, private_folder, write_atomic
from penstock.infra.bus.server import deathsig
from penstock.infra.bus.server.server import (
    GREET_S_MAX,
    HUB_DOMAIN,
    LEAF_USER,
    MAX_PAYLOAD_BYTES,
)
from penstock.infra.config.regions import RegionPlace

START_S_MAX = 60.0
STOP_S_MAX = 10.0
POLL_S = 0.05
_GREETED = b"JetStream using domains"
"""In the log once the hub has answered; a proxy may accept the connection without it."""


class LeafNode:
    """One region's leaf node, on its port however often it is started."""

    def __init__(self, folder: Path, program: Path, link: Link, token: str) -> None:
        """Prepare.

        Args:
            folder: for its configuration and log.
            program: nats-server.
            link: to the hub; the node runs in its namespace.
            token: the hub's, which is the node's as well.

        """
        port = free_port()
        url = f"nats://{token}@127.0.0.1:{port}"
        self.place = RegionPlace(url=url, entrance=link.entrance)
        self._folder = folder
        self._program = program
        self._config = _config(folder.name, port, link.hub_address, token)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Id of the newest process; 0 before the first start."""
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Start, and wait until it has reached the hub.

        Raises:
            LinkError: it has not, in time.

        """
        private_folder(self._folder)
        write_atomic(self._folder / "leaf.conf", self._config.encode(), mode=0o600)
        argv = [*self.place.entrance, str(self._program), "-c", str(self._folder / "leaf.conf")]
        with open_private(self._folder / "leaf.log", "wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", deathsig.__file__, str(os.getpid()),
                shutil.which(argv[0]) or argv[0], *argv[1:],
                stdout=log, stderr=log, process_group=0,
            )  # fmt: skip
        await self._until_greeted(self._process)

    async def keep(self) -> None:
        """Start it again whenever it dies.

        Raises:
            LinkError: it does not reach the hub any more.

        """
        while True:
            assert self._process is not None, "start() comes first"
            await self._process.wait()
            sys.stderr.write(f"[run] leaf node of {self._folder.name} died; starting it again\n")
            await self.start()

    async def stop(self) -> None:
        """Terminate it, or kill it."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_S_MAX):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _until_greeted(self, process: asyncio.subprocess.Process) -> None:
        log = self._folder / "leaf.log"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S_MAX):
                while process.returncode is None:
                    if _GREETED in await asyncio.to_thread(log.read_bytes):
                        return
                    await asyncio.sleep(POLL_S)
        tail = (await asyncio.to_thread(log.read_text, errors="replace")).splitlines()[-3:]
        text = f"leaf node of {self._folder.name}: did not reach the hub"
        raise LinkError(f"{text}: {' / '.join(tail)}")


@contextlib.asynccontextmanager
async def leaf_node(
    folder: Path, program: Path, link: Link, token: str
) -> AsyncGenerator[LeafNode]:
    """Run a region's leaf node for as long as the body runs; see `LeafNode`.

    Raises:
        LinkError: it did not reach the hub in time.

    """
    node = LeafNode(folder, program, link, token)
    try:
        await node.start()
        yield node
    finally:
        await node.stop()


def _config(name: str, port: int, hub_address: str, token: str) -> str:
    url = json.dumps(f"nats-leaf://{LEAF_USER}:{token}@{hub_address}")
    return f"""
server_name: leaf-{name}-{os.getpid()}
listen: "127.0.0.1:{port}"
max_payload: {MAX_PAYLOAD_BYTES}
max_pending: {256 << 20}
write_deadline: "60s"
authorization {{ token: {json.dumps(token)}, timeout: {GREET_S_MAX} }}
mappings: {{ "$JS.API.>": "$JS.{HUB_DOMAIN}.API.>" }}
leafnodes {{
  reconnect: "1s"
  remotes: [ {{ url: {url} }} ]
}}
"""
