"""Programs, and local servers for the egress proxy to reach."""

import asyncio
from contextlib import asynccontextmanager

from penstock.envs.egress.account import EgressLimits
from penstock.envs.egress.proxy import EgressProxy
from penstock.envs.egress.rules import parse_rules

PAGE = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello"


class Program:
    """A program's end of a connection."""

    def __init__(self, *pieces):
        self.pieces, self.said = list(pieces), b""

    async def receive(self):
        return self.pieces.pop(0) if self.pieces else await asyncio.sleep(60, b"")

    async def send(self, data):
        self.said += data


@asynccontextmanager
async def serving(answer):
    """Serve on a local port; yield the port and the list of what was received."""
    heard = []

    tasks = set()

    async def serve(reader, writer):
        tasks.add(asyncio.current_task())
        try:
            heard.append(await reader.read(65536))
            await answer(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], heard
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def page(reader, writer):
    writer.write(PAGE)


async def echo(reader, writer):
    writer.write(b"first")
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


def proxy_to(port, resolve=None, **limits):
    rules = parse_rules([f"good.test:{port}@127.0.0.1", f"name.test:{port}"], allows_addresses=True)
    return EgressProxy(rules, EgressLimits(**limits), resolve)


def get(url, *lines):
    host = url.partition("//")[2].partition("/")[0] or "whatever"
    return "\r\n".join([f"GET {url} HTTP/1.1", f"host: {host}", *lines, "", ""]).encode()
