"""The listening socket: a bound on connections, and a time limit on request headers.

aiohttp closes a connection whose header is incomplete after the keep-alive time. When all
connections are taken, a new one replaces the oldest connection without a request in progress, so
that clients that only hold connections open cannot lock others out.
"""

import asyncio
import logging
import ssl

from aiohttp import web
from aiohttp.typedefs import Handler

from penstock.gateway.config import GatewayConfig
from penstock.messages.errors import ConfigError

log = logging.getLogger(__name__)

_LINGERING_S = 2.0
"""Seconds to wait for the rest of an unread body after the response is sent."""
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: 0\r\n\r\n"
)


class Listener:
    """Serves one application on one address."""

    def __init__(self, config: GatewayConfig) -> None:
        """Prepare; nothing listens before `start`."""
        self._config = config
        self._busy: set[asyncio.BaseProtocol] = set()
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    @web.middleware
    async def note_busy(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Protect a connection from being closed while its request is in progress."""
        connection = request.protocol
        self._busy.add(connection)
        try:
            return await handler(request)
        finally:
            self._busy.discard(connection)

    async def start(self, app: web.Application) -> str:
        """Listen and return the base URL.

        Raises:
            OSError: The address is in use.
            ConfigError: Certificate or key are not readable, or TLS is expected and missing.

        """
        config = self._config
        config.check_encrypted()
        tls = _tls(config) if config.tls_cert else None
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=config.drain_s_max,
            keepalive_timeout=config.header_s_max,
            lingering_time=_LINGERING_S,
            auto_decompress=False,  # See `request_body.py`.
        )
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        # Several gateways share one port, and the kernel spreads connections over them.
        reuses = config.is_one_of_several and config.port > 0
        self._server = await loop.create_server(
            self._connection, config.host, config.port, reuse_port=reuses, ssl=tls
        )
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{config.scheme}://{host}:{port}"

    async def stop(self) -> None:
        """Accept no more connections and let open requests finish."""
        assert self._server is not None, "it has not started"
        assert self._runner is not None, "it has not started"
        self._server.close()
        # aiohttp itself waits `drain_s_max`; 5 s more are for closing what is left then.
        async with asyncio.timeout(self._config.drain_s_max + 5.0):
            await self._runner.cleanup()

    def _connection(self) -> asyncio.Protocol:
        """Return the protocol that serves a new connection."""
        assert self._runner is not None, "it has not started"
        server = self._runner.server
        if server is None:
            # The runner is shutting down, but the connection was in the backlog already.
            return _Refusal()
        connections = server.connections
        if len(connections) >= self._config.num_connections_max:
            # aiohttp lists connections in the order in which they came.
            idle = next((held for held in connections if held not in self._busy), None)
            if idle is None:
                log.warning("connection refused: all %d are busy", len(connections))
                return _Refusal()
            log.debug("%d connections are open: the oldest idle one is closed", len(connections))
            idle.force_close()
        return server()


def _tls(config: GatewayConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:
        text = f"gateway.tls_cert, gateway.tls_key: {config.tls_cert}, {config.tls_key}"
        raise ConfigError(f"{text}: expected a certificate and its key: {error}") from error
    return context


class _Refusal(asyncio.Protocol):
    """Answers 503 and closes the connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL)
        transport.close()
