"""The gateway's socket: so many connections, each of which must say what it wants in time.

aiohttp closes a connection whose header is not whole after its keep-alive time. Where all places
are taken, the oldest connection that has no request in progress goes, so that connections held
open shut nobody out.
"""

import asyncio

from aiohttp import web
from aiohttp.typedefs import Handler

from penstock.gateway.config import GatewayConfig

_LINGERING_S = 2.0
"""Longest wait for the rest of a body that nobody reads, after its answer."""
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: 0\r\n\r\n"
)


class Listener:
    """Serves one application on one address."""

    def __init__(self, config: GatewayConfig) -> None:
        """Nothing listens before `start`."""
        self._config = config
        self._busy: set[asyncio.BaseProtocol] = set()
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    @web.middleware
    async def note_busy(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keep a connection while its request is in progress."""
        connection = request.protocol
        self._busy.add(connection)
        try:
            return await handler(request)
        finally:
            self._busy.discard(connection)

    async def start(self, app: web.Application) -> str:
        """Listen; return the base URL.

        Raises:
            OSError: The address is taken.

        """
        config = self._config
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=config.drain_s_max,
            keepalive_timeout=config.header_s_max,
            lingering_time=_LINGERING_S,
            auto_decompress=False,
        )
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        reuses = config.is_one_of_several and config.port > 0  # The kernel spreads connections.
        self._server = await loop.create_server(
            self._connection, config.host, config.port, reuse_port=reuses
        )
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        """Accept nothing more, and let open requests end."""
        assert self._server is not None, "it has not started"
        assert self._runner is not None, "it has not started"
        self._server.close()
        async with asyncio.timeout(self._config.drain_s_max + 5.0):
            await self._runner.cleanup()

    def _connection(self) -> asyncio.Protocol:
        """Return what serves a new connection."""
        assert self._runner is not None, "it has not started"
        server = self._runner.server
        if server is None:
            return _Refusal()
        connections = server.connections
        if len(connections) >= self._config.num_connections_max:
            idle = next((one for one in connections if one not in self._busy), None)
            if idle is None:
                return _Refusal()
            idle.force_close()
        return server()


class _Refusal(asyncio.Protocol):
    """Says that there is no place."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL)
        transport.close()
