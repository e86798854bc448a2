"""Embedded server that is restarted whenever it dies, for as long as a block runs."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.output import write_to
from penstock.messages.errors import BusError, DeadlineError

SERVER_PAUSE_S = 0.5


@contextlib.asynccontextmanager
async def kept_server(
    store_dir: Path,
    binary: str | None,
    *,
    leaf_listen: str = "",
    identities: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> AsyncGenerator[EmbeddedServer]:
    """Yield a running server; see `EmbeddedServer` for the arguments."""
    async with contextlib.AsyncExitStack() as stack:
        server = EmbeddedServer(
            store_dir=store_dir, binary=binary, leaf_listen=leaf_listen, identities=identities
        )
        await server.start()
        stack.push_async_callback(server.stop)
        keeper = asyncio.create_task(keep_server(server), name="keep nats-server")
        stack.callback(keeper.cancel)
        yield server


async def keep_server(server: EmbeddedServer) -> None:
    """Restart the server on the same port and store whenever it dies, even during a start."""
    while True:
        await server.wait()
        write_to(sys.stderr, "[run] nats-server died; restarting it\n")
        try:
            await server.start()
        except (BusError, DeadlineError) as error:
            # Keep trying: clients wait for it and decide themselves when to give up.
            write_to(sys.stderr, f"[run] {error}\n")
            await asyncio.sleep(SERVER_PAUSE_S)
