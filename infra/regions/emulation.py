"""The regions of a run that have a link: made before its actors, gone after them."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import msgspec

from penstock.infra.bus.server import EmbeddedServer
from penstock.infra.bus.server_binary import find_server
from penstock.infra.regions.leaf import leaf_node
from penstock.infra.regions.links import (
    Link,
    LinkError,
    free_port,
    free_subnet,
    open_proxy,
    open_tunnel,
)
from penstock.infra.regions.probe import probe_namespaces
from penstock.infra.regions.settings import LinkSection, RegionPlace

log = logging.getLogger(__name__)


class Linked(msgspec.Struct, frozen=True, kw_only=True):
    """A region behind a link."""

    name: str
    link: LinkSection


class Emulation:
    """Links first, as the hub listens on their address; then leaf nodes, which dial it."""

    def __init__(self, regions: Sequence[Linked], folder: Path) -> None:
        """Args: `folder` gets a folder of each region, for its leaf node."""
        self._regions = regions
        self._folder = folder
        self._links: dict[str, Link] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    @contextlib.asynccontextmanager
    async def links(self, say: Callable[[str], None]) -> AsyncGenerator[str]:
        """Open every link; give the host:port on which the hub is to listen for leaf nodes.

        Raises:
            LinkError: one could not be made.

        """
        port = free_port()
        obstacle = await probe_namespaces()
        subnet = await free_subnet() if not obstacle else None
        async with contextlib.AsyncExitStack() as stack:
            for index, region in enumerate(self._regions):
                opening = (
                    open_proxy(index, region.link, port)
                    if subnet is None
                    else open_tunnel(subnet, index, region.link, port)
                )
                self._links[region.name] = await stack.enter_async_context(opening)
                say(_words(region, obstacle))
            yield f"{subnet.hub if subnet else '127.0.0.1'}:{port}"

    @contextlib.asynccontextmanager
    async def places(
        self, server: EmbeddedServer, program: str | None
    ) -> AsyncGenerator[dict[str, RegionPlace]]:
        """Start a leaf node in every region; give where the regions are.

        Raises:
            LinkError: one did not reach the hub, or a link or leaf node ended.

        """
        found = await asyncio.to_thread(find_server, Path(program) if program else None)
        places: dict[str, RegionPlace] = {}
        async with contextlib.AsyncExitStack() as stack:
            for name, link in self._links.items():
                node = leaf_node(self._folder / name, found, link, server.token)
                places[name], process = await stack.enter_async_context(node)
                self._processes[f"leaf node of {name}"] = process
                self._processes[f"link of {name}"] = link.process
            try:
                async with asyncio.TaskGroup() as group:
                    watching = group.create_task(self._watch(), name="watch regions")
                    yield places
                    watching.cancel()
            except* LinkError as failures:
                raise failures.exceptions[0] from None

    async def _watch(self) -> None:
        """Wait that a link or leaf node ends: its region is lost then, and the run with it."""
        waits = {
            asyncio.create_task(process.wait(), name=name)
            for name, process in self._processes.items()
        }
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            raise LinkError(f"regions: ended: {', '.join(task.get_name() for task in done)}")
        finally:
            for task in waits:
                task.cancel()


def _words(region: Linked, obstacle: str) -> str:
    link = region.link
    figures = f"{link.bandwidth_mbit_s:g} Mbit/s, {link.rtt_ms:g} ms round trip, loss {link.loss:g}"
    kind = f"in-process shaping, as {obstacle}" if obstacle else "network namespace"
    return f"region {region.name}: {figures} ({kind})"
