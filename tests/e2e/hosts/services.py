"""What the hosts of a run share: three NATS servers of one cluster, and an S3 store."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from tests.e2e.hosts.lan import Host, Lan, serve_nats, serve_s3
from tests.lab.regions.links import probe_namespaces

TOKEN = "s3cret-of-the-cluster"
MASTER_KEY = "5e" * 32
BUCKETS = ("objects", "west", "east")
_ASK = """\
import asyncio, nats, sys
async def main():
    client = await nats.connect(sys.argv[3:], token=sys.argv[1])
    reply = await client.request(sys.argv[2], b'', timeout=9)
    print(reply.data.decode())
asyncio.run(main())
"""
_MAKE_BUCKETS = """\
import sys, time, urllib.request
for url in sys.argv[1:]:
    for _ in range(600):
        try:
            urllib.request.urlopen(urllib.request.Request(url, method='PUT')); break
        except OSError: time.sleep(0.1)
"""


class Services:
    """The servers and the store, each on a host of its own."""

    def __init__(self, root: Path, lan: Lan) -> None:
        self.servers = [Host(lan, f"n{index}", root) for index in range(3)]
        self.store = Host(lan, "s3", root)
        serve_nats(self.servers, TOKEN)
        self.endpoint = serve_s3(self.store)

    @property
    def urls(self) -> list[str]:
        """Of the servers."""
        return [f"nats://{server.address}:4222" for server in self.servers]

    @property
    def hosts_toml(self) -> str:
        """Items of `allow_plain_text`: this network is of the test alone."""
        return ", ".join(f'"{host.address}"' for host in (self.store, *self.servers))

    @property
    def urls_toml(self) -> str:
        """Items of `bus.servers`."""
        return ", ".join(f'"{url}"' for url in self.urls)

    async def make_buckets(self) -> None:
        """Make the buckets, as soon as the store is up."""
        urls = [f"{self.endpoint}/{name}" for name in BUCKETS]
        process = await asyncio.create_subprocess_exec(
            *self.store.command(sys.executable, "-c", _MAKE_BUCKETS, *urls)
        )
        assert await process.wait() == 0

    async def ask_servers(self, host: Host, subject: str) -> dict:
        """Return what the servers answer a host on a subject of theirs."""
        process = await asyncio.create_subprocess_exec(
            *host.command(sys.executable, "-c", _ASK, TOKEN, subject, *self.urls),
            stdout=subprocess.PIPE,
        )
        return json.loads((await process.communicate())[0])

    async def leader(self, host: Host) -> Host:
        """Return the host of the server that leads the stream of steps; `host` asks."""
        info = await self.ask_servers(host, "$JS.API.STREAM.INFO.PS_TRAINING")
        return next(one for one in self.servers if one.name == info["cluster"]["leader"])

    async def end(self) -> None:
        """End all of them."""
        for host in (self.store, *self.servers):
            await host.lose()


S = TypeVar("S", bound=Services)


@asynccontextmanager
async def open_site(kind: type[S], root: Path) -> AsyncIterator[S]:
    """Open a network with services of a kind, or skip the test where that is not possible."""
    if obstacle := await probe_namespaces():
        pytest.skip(f"network namespaces: {obstacle}")
    pytest.importorskip("moto.server")
    pytest.importorskip("obstore")
    lan = Lan(os.getpid() % 256)
    lan.open()
    try:
        site = kind(root, lan)
        try:
            await site.make_buckets()
            yield site
        finally:
            await site.end()
    finally:
        lan.close()
