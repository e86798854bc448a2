"""`/healthz` and `/readyz` of a process."""

import json
import socket

import aiohttp
import pytest

from penstock.infra.health import health_server
from penstock.messages.errors import ConfigError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def ask(port: int, path: str) -> tuple[int, dict]:
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"http://127.0.0.1:{port}{path}") as reply,
    ):
        return reply.status, json.loads(await reply.text())


async def test_a_process_is_alive_at_once_and_ready_when_all_its_actors_are():
    waiting, port = {"generator-west": "no weights yet"}, free_port()
    async with health_server(port, lambda: waiting):
        assert await ask(port, "/healthz") == (200, {"status": "ok"})
        assert await ask(port, "/readyz") == (503, {"ready": False, "waiting": waiting})
        waiting.clear()
        assert await ask(port, "/readyz") == (200, {"ready": True, "waiting": {}})
    with pytest.raises(aiohttp.ClientConnectorError):
        await ask(port, "/healthz")


async def test_a_port_that_is_taken_is_named():
    port = free_port()
    async with health_server(port, dict):
        with pytest.raises(ConfigError, match=rf"--health-port: {port}: "):
            async with health_server(port, dict):
                pass


async def test_port_0_listens_nowhere():
    async with health_server(0, dict):
        pass
