"""The proxy of one machine: HTTP `CONNECT` and plain requests to allowed hosts, all on record.

A name is resolved once, here, and the connection goes to an address that was checked. Redirects are
not followed: a program that follows one sends another request. One connection carries one request,
so nothing for another host can follow it. The content of a TLS tunnel is not seen, but for the
server's name in its first message, which must be the allowed one (`hello.py`). Hosts that a rule
gives an address are the operator's own: their tunnels may carry anything.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import h11

from penstock.envs.egress.account import EgressAccount, EgressEntry, EgressLimitError, EgressLimits
from penstock.envs.egress.hello import ALERT, check_hello
from penstock.envs.egress.http import (
    TUNNEL_OPEN,
    check_host,
    forwarded,
    refusal,
    requested_target,
)
from penstock.envs.egress.rules import EgressDeniedError, EgressRule, check_addresses, find_rule
from penstock.envs.egress.streams import GuestStream
from penstock.messages.errors import PenstockError

TARGET_CHARACTERS_MAX = 256
HEAD_BYTES_MAX = 16 << 10
HELLO_PIECES_MAX = 64
"""Each is read with all before it."""
Resolve = Callable[[str, int], Awaitable[list[str]]]


class EgressFailedError(PenstockError, ConnectionError):
    """An allowed host did not answer."""


class EgressProxy:
    """Serves the streams of one machine's programs.

    Args:
        rules: The task's allow-list.
        limits: Bounds of the machine.
        resolve: Name and port to addresses; the host's own resolver by default.

    """

    def __init__(
        self, rules: tuple[EgressRule, ...], limits: EgressLimits, resolve: Resolve | None = None
    ) -> None:
        self.account = EgressAccount(limits)
        self._rules, self._limits = rules, limits
        self._resolve = resolve or resolve_here

    async def serve(self, client: GuestStream) -> None:
        """Answer one connection of a program.

        Raises:
            SandboxError: The program hung up; what it tried is on record all the same.

        """
        entry = self.account.open()
        try:
            async with asyncio.timeout(self._limits.connection_s_max):
                await self._answer(client, entry)
        except EgressDeniedError as error:
            entry.is_allowed = False
            entry.reason = f"denied: {error}"
            refused = refusal(403, f"{entry.target}: {error}")
            await client.send(ALERT if entry.is_answered else refused)
        except (EgressLimitError, EgressFailedError, TimeoutError) as error:
            entry.reason = str(error) or "the connection lasted too long"
            if not entry.is_answered:
                status = 429 if isinstance(error, EgressLimitError) else 502
                await client.send(refusal(status, f"{entry.target}: {entry.reason}"))
        except h11.RemoteProtocolError as error:
            entry.reason = f"malformed request: {error}"
            await client.send(refusal(400, entry.reason))
        finally:
            self.account.close(entry)

    async def _answer(self, client: GuestStream, entry: EgressEntry) -> None:
        head = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        request = await _next_event(client, head)
        if not isinstance(request, h11.Request):
            return  # hung up before its request
        entry.method, target_text = request.method.decode(), request.target.decode()
        entry.target = target_text[:TARGET_CHARACTERS_MAX]
        name, port, path = requested_target(entry.method, target_text)
        entry.target = f"{name}:{port}"
        check_host(request, name, port)
        rule = find_rule(self._rules, name, port)
        self.account.admit()
        entry.is_allowed = True
        address = await self._locate(rule, name, port)
        reader, writer = await self._connect(address, port)
        try:
            if entry.method == "CONNECT":
                entry.is_answered = True
                await client.send(TUNNEL_OPEN)
                first = head.trailing_data[0]
                if not rule.address:
                    first = await _hello(client, first, name)
                await self._tunnel(client, first, reader, writer, entry)
            else:
                onward = forwarded(request, entry.target, path)
                await self._forward(client, head, onward, writer, entry)
                await self._back(client, reader, entry)
        except EgressDeniedError:  # an OSError, too
            raise
        except OSError as error:
            raise EgressFailedError(f"lost the host: {error}") from error
        finally:
            writer.transport.abort()  # what a stalled host has not taken would keep the socket

    async def _locate(self, rule: EgressRule, name: str, port: int) -> str:
        if rule.address:
            return rule.address
        try:
            addresses = await self._resolve(name, port)
        except OSError as error:
            raise EgressFailedError(f"no such name: {error}") from error
        check_addresses(addresses)
        return addresses[0]

    async def _connect(
        self, address: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(self._limits.connect_s_max):
                return await asyncio.open_connection(address, port)
        except OSError as error:  # a timeout is one
            raise EgressFailedError(f"cannot connect: {error or 'no answer'}") from error

    async def _forward(
        self,
        client: GuestStream,
        head: h11.Connection,
        request: h11.Request,
        writer: asyncio.StreamWriter,
        entry: EgressEntry,
    ) -> None:
        """Send one request on, its body with it, and not a byte more."""
        onward = h11.Connection(h11.CLIENT)
        event: h11.Event = request
        while True:
            await self._out(onward.send(event) or b"", writer, entry)
            if isinstance(event, h11.EndOfMessage):
                return
            event = await _next_event(client, head)

    async def _out(self, data: bytes, writer: asyncio.StreamWriter, entry: EgressEntry) -> None:
        self.account.sent(entry, len(data))
        writer.write(data)
        await writer.drain()

    async def _back(
        self, client: GuestStream, reader: asyncio.StreamReader, entry: EgressEntry
    ) -> None:
        while data := await reader.read(HEAD_BYTES_MAX):
            self.account.received(entry, len(data))
            entry.is_answered = True
            await client.send(data)

    async def _there(
        self, client: GuestStream, data: bytes, writer: asyncio.StreamWriter, entry: EgressEntry
    ) -> None:
        await self._out(data, writer, entry)
        while data := await client.receive():
            await self._out(data, writer, entry)
        writer.write_eof()

    async def _tunnel(
        self,
        client: GuestStream,
        first: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        entry: EgressEntry,
    ) -> None:
        """Carry bytes both ways until the host outside ends it."""
        there = asyncio.ensure_future(self._there(client, first, writer, entry))
        back = asyncio.ensure_future(self._back(client, reader, entry))
        try:
            await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
            if not back.done():
                await there
            await back
        finally:
            there.cancel()
            back.cancel()
            await asyncio.gather(there, back, return_exceptions=True)


async def resolve_here(name: str, port: int) -> list[str]:
    """Resolve by the host's resolver; raises OSError if there is no such name."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


async def _hello(client: GuestStream, first: bytes, name: str) -> bytes:
    """Return a tunnel's first bytes once they have asked for the allowed server.

    Raises:
        EgressDeniedError: They have not, or end before.

    """
    for _ in range(HELLO_PIECES_MAX):
        if check_hello(first, name):
            return first
        piece = await client.receive()
        if not piece:
            raise EgressDeniedError("the tunnel ended before its TLS ClientHello")
        first += piece
    raise EgressDeniedError(f"a TLS ClientHello in more than {HELLO_PIECES_MAX} pieces")


async def _next_event(client: GuestStream, head: h11.Connection) -> h11.Event:
    while (event := head.next_event()) is h11.NEED_DATA:
        head.receive_data(await client.receive())
    assert not isinstance(event, type), f"{event} before the request's end"
    return event
