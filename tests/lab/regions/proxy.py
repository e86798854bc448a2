"""A link where namespaces are not allowed: `python -m tests.lab.regions.proxy SPEC`.

It listens on a loopback port, dials the hub for each connection, and lets every chunk of the stream
arrive when a link of that bandwidth, delay and loss would: a lost chunk comes a round trip later,
and all behind it. TCP itself sees a perfect network, so its congestion control is not exercised.
"""

import asyncio
import sys
from collections.abc import Sequence

import msgspec
from tests.lab.regions.settings import LinkSection
from tests.lab.regions.shaping import Shaper

from penstock.messages.reading.parsing import parse_json

CHUNK_BYTES = 16 << 10
NUM_IN_FLIGHT_MAX = 4096
"""Chunks in flight in one direction of one connection; beyond it the sender waits."""
CONNECT_S_MAX = 10.0


class Proxy(msgspec.Struct, frozen=True, kw_only=True):
    """One region's proxy."""

    port: int
    hub_port: int
    link: LinkSection
    seed: int = 0


class ShapedProxy:
    """Carries all connections of a region; they share the link's two directions."""

    def __init__(self, spec: Proxy) -> None:
        self._spec = spec
        self._up, self._down = (Shaper(spec.link, spec.seed + i) for i in range(2))

    async def serve(self) -> asyncio.Server:
        """Begin to listen.

        Raises:
            OSError: the port is taken.

        """
        return await asyncio.start_server(self._carry, "127.0.0.1", self._spec.port)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                hub = await asyncio.open_connection("127.0.0.1", self._spec.hub_port)
        except (OSError, TimeoutError):
            writer.close()
            return
        directions = (
            _carry_one_way(reader, hub[1], self._up),
            _carry_one_way(hub[0], writer, self._down),
        )
        await asyncio.gather(*directions, return_exceptions=True)


async def _carry_one_way(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, shaper: Shaper
) -> None:
    """Carry one direction to its end; then close the other end of it."""
    now_s = asyncio.get_running_loop().time
    chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(NUM_IN_FLIGHT_MAX)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_deliver(chunks, writer))
            while chunk := await reader.read(CHUNK_BYTES):
                await chunks.put((shaper.arrival_in_stream_s(now_s(), len(chunk)), chunk))
            await chunks.put((now_s(), b""))
    finally:
        writer.close()


async def _deliver(
    chunks: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
) -> None:
    now_s = asyncio.get_running_loop().time
    while True:
        arrival_s, chunk = await chunks.get()
        if not chunk:
            return
        await asyncio.sleep(arrival_s - now_s())
        writer.write(chunk)
        await writer.drain()


async def run(spec: Proxy) -> None:
    """Print `ready`, and serve until killed."""
    server = await ShapedProxy(spec).serve()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await server.serve_forever()


def main(argv: Sequence[str]) -> int:
    """Run the process."""
    asyncio.run(run(parse_json(argv[1], Proxy, "argument")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
