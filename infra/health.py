"""`/healthz` and `/readyz` of a process of a run, for what watches it from outside: Kubernetes."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping

from aiohttp import web

from penstock.messages.errors import ConfigError

ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 - Kubernetes asks at the address of the pod.
STOP_S_MAX = 1.0


@contextlib.asynccontextmanager
async def health_server(
    port: int, not_ready: Callable[[], Mapping[str, str]]
) -> AsyncGenerator[None]:
    """Answer on a port while the block runs; on none if it is 0.

    `/healthz` gives 200 as long as the event loop runs: a process whose loop hangs is to be
    restarted. `/readyz` gives 200 once every actor of the process can serve, else 503.

    Args:
        port: On all addresses of the machine.
        not_ready: Returns the name of each actor that cannot serve, and why.

    Raises:
        ConfigError: The port is taken.

    """
    if not port:
        yield
        return

    async def healthz(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(request: web.Request) -> web.Response:
        waiting = not_ready()
        body = {"ready": not waiting, "waiting": dict(waiting)}
        return web.json_response(body, status=503 if waiting else 200)

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_S_MAX)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, ALL_ADDRESSES, port).start()
        except OSError as error:
            raise ConfigError(f"--health-port: {port}: {error}") from error
        yield
    finally:
        await runner.cleanup()
