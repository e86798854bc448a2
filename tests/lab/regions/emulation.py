"""The regions of a run that have a link: made before its actors, gone after them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import msgspec
from tests.lab.regions.leaf import LeafNode, leaf_node
from tests.lab.regions.links import (
    HOW_TO_GET,
    Link,
    LinkError,
    free_port,
    free_subnet,
    open_proxy,
    open_tunnel,
    probe_namespaces,
)
from tests.lab.regions.settings import LinkSection

from penstock.infra.bus.server.server import EmbeddedServer, find_server
from penstock.infra.config.regions import RegionPlace


class Linked(msgspec.Struct, frozen=True, kw_only=True):
    """A region behind a link."""

    name: str
    link: LinkSection


class Emulation:
    """Links first, since the hub listens on their address; then leaf nodes, which dial it."""

    def __init__(self, regions: Sequence[Linked], folder: Path) -> None:
        """Args: `folder`, in that of the run, gets a folder of each region, for its leaf node."""
        self._regions = regions
        self._folder = folder
        self._links: dict[str, Link] = {}
        self.nodes: dict[str, LeafNode] = {}
        """Leaf nodes by region, while `places` is open."""

    @contextlib.asynccontextmanager
    async def links(self, say: Callable[[str], None]) -> AsyncGenerator[str]:
        """Open every link; yield the host:port on which the hub is to listen for leaf nodes.

        Raises:
            LinkError: one could not be made.

        """
        port = free_port()
        obstacle = await probe_namespaces()
        subnet = await free_subnet() if not obstacle else None
        if obstacle:
            say(f"regions: for network namespaces, {HOW_TO_GET}")
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
        """Start a leaf node in every region; yield the regions' places.

        Raises:
            LinkError: one did not reach the hub, or a link ended.

        """
        found = await asyncio.to_thread(find_server, Path(program) if program else None)
        async with contextlib.AsyncExitStack() as stack:
            for name, link in self._links.items():
                node = leaf_node(self._folder / name, found, link, server.token)
                self.nodes[name] = await stack.enter_async_context(node)
            try:
                async with asyncio.TaskGroup() as group:
                    watchers = [group.create_task(node.keep()) for node in self.nodes.values()]
                    watchers += [group.create_task(self._watch(name)) for name in self._links]
                    yield {name: node.place for name, node in self.nodes.items()}
                    for watcher in watchers:
                        watcher.cancel()
            except ExceptionGroup as failures:  # The body's own error comes in a group, too.
                raise failures.exceptions[0] from None

    async def _watch(self, name: str) -> None:
        """Wait until a link ends: its namespace and everything in it are lost then.

        Raises:
            LinkError: it ended.

        """
        await self._links[name].process.wait()
        resume = f"python -m tests.lab regions --resume {self._folder.parent.name}"
        raise LinkError(f"the link of region {name} ended; resume with: {resume}")


def _words(region: Linked, obstacle: str) -> str:
    link = region.link
    figures = f"{link.bandwidth_mbit_s:g} Mbit/s, {link.rtt_ms:g} ms round trip, loss {link.loss:g}"
    kind = f"in-process shaping, as {obstacle}" if obstacle else "network namespace"
    return f"region {region.name}: {figures} ({kind})"
