"""Client of the part of Firecracker's API that machines need: JSON over HTTP on a Unix socket."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import aiohttp

from penstock.envs.sandbox import SandboxDied, SandboxError, SandboxTimeout
from penstock.messages.retries import RetryPolicy, with_retries

VSOCK_PORT = 52
"""Port of the guest's vsock on which the agent listens."""
POLL_S = 0.002
"""Seconds between attempts to connect."""


class FirecrackerError(SandboxError):
    """Firecracker refused a request; the error has its reason."""


class FirecrackerApi:
    """API of one Firecracker process.

    Args:
        path: Path of its socket on the host.
        deadline_s: Maximum seconds of each request; saving memory takes the longest.

    """

    def __init__(self, path: Path, deadline_s: float) -> None:
        self._path = path
        self._deadline_s = deadline_s

    async def put(self, resource: str, **body: Any) -> None:
        """Create a resource or start an action.

        Args:
            resource: Path of the resource.
            body: Fields of the JSON body.

        Raises:
            FirecrackerError: Firecracker refused the request.
            SandboxDied: Firecracker has ended.
            SandboxTimeout: No answer within the deadline.

        """
        await self._request("PUT", resource, body)

    async def patch(self, resource: str, **body: Any) -> None:
        """Change a resource; arguments and errors are those of `put`."""
        await self._request("PATCH", resource, body)

    async def _request(self, method: str, resource: str, body: dict[str, Any]) -> None:
        url = f"http://localhost{resource}"
        timeout = aiohttp.ClientTimeout(total=self._deadline_s)
        connector = aiohttp.UnixConnector(path=str(self._path))
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.request(method, url, json=body) as answer,
            ):
                if answer.status != 204:
                    reason = (await answer.text())[:500]
                    raise FirecrackerError(
                        f"Firecracker: {method} {resource}: {answer.status}: {reason}"
                    )
        except TimeoutError:
            text = f"Firecracker: no answer to {method} {resource} within {self._deadline_s:g} s"
            raise SandboxTimeout(text) from None
        except (aiohttp.ClientError, OSError) as error:
            raise SandboxDied(f"Firecracker: {method} {resource}: {error}") from error


async def await_socket(path: Path, *, deadline_s: float) -> None:
    """Wait until a server listens at a socket.

    Raises:
        TimeoutError: No server listens within `deadline_s`.

    """
    async with asyncio.timeout(deadline_s):
        _, writer = await with_retries(
            lambda: asyncio.open_unix_connection(path),
            RetryPolicy(pause_s=POLL_S),
            retry_on=(OSError,),
        )
    writer.close()


async def connect_vsock(
    path: Path, make_protocol: Any, *, deadline_s: float
) -> tuple[asyncio.BaseTransport, Any]:
    """Connect to the guest agent through Firecracker's socket (`CONNECT <port>`, then `OK <n>`).

    Raises:
        TimeoutError: The guest did not listen within `deadline_s`.

    """
    # Firecracker closes the connection while the guest boots and does not listen yet: retry.
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(deadline_s):
        retry = RetryPolicy(pause_s=POLL_S)
        sock = await with_retries(lambda: _shake_hands(path), retry, retry_on=(OSError,))
        return await loop.create_connection(make_protocol, sock=sock)


async def _shake_hands(path: Path) -> socket.socket:
    """Return a socket that the guest agent has accepted; raise OSError if it does not listen."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    answer = b""
    try:
        await loop.sock_connect(sock, str(path))
        await loop.sock_sendall(sock, f"CONNECT {VSOCK_PORT}\n".encode())
        # Byte by byte: the hello of the guest may follow directly and belongs to the protocol.
        while not answer.endswith(b"\n"):
            byte = await loop.sock_recv(sock, 1)
            if not byte or len(answer) > 32:
                break
            answer += byte
        if not answer.startswith(b"OK "):
            raise ConnectionError(f"{path}: the guest does not listen yet")
    except OSError:
        sock.close()
        raise
    return sock
