"""A nats-server at the far end of a link: a leaf node of the run's server, without JetStream."""

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

from penstock.actors.runtime.files import write_atomic
from penstock.infra.bus import deathsig
from penstock.infra.bus.server import HUB_DOMAIN, LEAF_USER, MAX_PAYLOAD_BYTES
from penstock.infra.regions.links import Link, LinkError, free_port
from penstock.infra.regions.settings import RegionPlace

START_S_MAX = 30.0
STOP_S_MAX = 10.0
POLL_S = 0.05
_GREETED = b"JetStream using domains"
"""In the log once the hub has answered; a proxy may accept the connection without it."""


@contextlib.asynccontextmanager
async def leaf_node(folder: Path, program: Path, link: Link, token: str) -> AsyncGenerator[
    tuple[RegionPlace, asyncio.subprocess.Process]
]:  # fmt: skip
    """Run a region's leaf node for as long as the body runs.

    Args:
        folder: for its configuration and log.
        program: nats-server.
        link: to the hub; the node runs in its namespace.
        token: the hub's, which is the node's as well.

    Raises:
        LinkError: it did not reach the hub in time.

    """
    port = free_port()
    place = RegionPlace(url=f"nats://{token}@127.0.0.1:{port}", namespace_pid=link.namespace_pid)
    await asyncio.to_thread(_write_config, folder, port, link, token)
    with (folder / "leaf.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", deathsig.__file__, str(os.getpid()), *_find(place.entrance),
            str(program), "-c", str(folder / "leaf.conf"),
            stdout=log, stderr=log, process_group=0,
        )  # fmt: skip
    try:
        await _until_connected(process, folder / "leaf.log")
        yield place, process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        async with asyncio.timeout(STOP_S_MAX):
            await process.wait()


def _find(entrance: list[str]) -> list[str]:
    """Give the program's path: `deathsig` does not look for it."""
    return [shutil.which(entrance[0]) or entrance[0], *entrance[1:]] if entrance else []


def _write_config(folder: Path, port: int, link: Link, token: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    url = json.dumps(f"nats-leaf://{LEAF_USER}:{token}@{link.hub_address}")
    config = f"""
server_name: leaf-{folder.name}-{os.getpid()}
listen: "127.0.0.1:{port}"
max_payload: {MAX_PAYLOAD_BYTES}
max_pending: {256 << 20}
write_deadline: "60s"
authorization {{ token: {json.dumps(token)} }}
mappings: {{ "$JS.API.>": "$JS.{HUB_DOMAIN}.API.>" }}
leafnodes {{
  reconnect: "1s"
  remotes: [ {{ url: {url} }} ]
}}
"""
    write_atomic(folder / "leaf.conf", config.encode(), mode=0o600)


async def _until_connected(process: asyncio.subprocess.Process, log: Path) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_S_MAX):
            while process.returncode is None:
                if _GREETED in await asyncio.to_thread(log.read_bytes):
                    return
                await asyncio.sleep(POLL_S)
    tail = (await asyncio.to_thread(log.read_text, errors="replace")).splitlines()[-3:]
    raise LinkError(f"leaf node: did not reach the hub: {' / '.join(tail)}")
