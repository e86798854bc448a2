"""The proxy of one machine: HTTP `CONNECT` and plain requests to allowed hosts, all on record.

A name is resolved once, here, and the connection goes to an address that was checked. Redirects are
not followed: a program that follows one sends another request. One connection carries one request,
so nothing for another host can follow it. The content of a TLS tunnel is not seen, but for the
server's name in its first message, which must be the allowed one (`hello.py`). Hosts that a rule
gives an address are the operator's own: their tunnels may carry anything.

The name in a TLS ClientHello, read from hostile bytes. Pure.

A tunnel's content is not seen, but its first message says which server is meant: another name than
the allowed one would reach another host behind the same address (fronting). A name that is
encrypted (ECH) cannot be compared, and neither can one that is not there.

Source: RFC 8446, 4.1.2; RFC 6066, 3; RFC 9849 (ECH).

HTTP as the proxy speaks it: requested targets, forwarded requests, and refusals. Pure.
"""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable

import h11

from penstock.envs.egress.account import EgressAccount, EgressEntry, EgressLimitError, EgressLimits
from penstock.envs.egress.rules import (
    EgressDeniedError,
    EgressRule,
    check_addresses,
    find_rule,
    parse_target,
)
from penstock.envs.egress.streams import GuestStream
from penstock.messages.errors import PenstockError

HELLO_BYTES_MAX = 16 << 10
ALERT = bytes.fromhex("15030100020270")
"""Fatal: unrecognized_name."""
_HANDSHAKE, _CLIENT_HELLO = 0x16, 1
_RECORD_HEAD, _MESSAGE_HEAD = 5, 4
_RECORD_BYTES_MAX = 1 << 14
_SERVER_NAME = 0
_ENCRYPTED_HELLOS = frozenset({0xFE0D, 0xFFCE})
"""ECH, and the ESNI before it; clients that only pretend (GREASE) cannot be told from them."""


class _Fields:
    """Reads length-prefixed fields; beyond the end it is a malformed hello."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._data):
            raise EgressDeniedError("malformed TLS ClientHello")
        part, self._at = self._data[self._at : end], end
        return part

    def number(self, num_bytes: int) -> int:
        return int.from_bytes(self.take(num_bytes), "big")

    def vector(self, length_bytes: int) -> bytes:
        return self.take(self.number(length_bytes))


def check_hello(data: bytes, name: str) -> bool:
    """Check that the first bytes of a tunnel ask for a server by its allowed name.

    Returns:
        Whether they are all there; if not, call again with more.

    Raises:
        EgressDeniedError: They are no TLS, too long, or name another server, none, or in secret.

    """
    message = _first_message(data)
    if message is None:
        return False
    asked = _server_name(message)
    if asked != name:
        raise EgressDeniedError(f"TLS asks for {asked!r}, the tunnel is to {name!r}")
    return True


def _first_message(data: bytes) -> bytes | None:
    """Return the first handshake message, joined from its records; None if it is not all there."""
    message, at = b"", 0
    while len(data) - at >= _RECORD_HEAD:
        kind, major = data[at], data[at + 1]
        length = int.from_bytes(data[at + 3 : at + _RECORD_HEAD], "big")
        if kind != _HANDSHAKE or major != 3 or not 0 < length <= _RECORD_BYTES_MAX:
            raise EgressDeniedError("expected TLS in a tunnel")
        message += data[at + _RECORD_HEAD : at + _RECORD_HEAD + length]
        at += _RECORD_HEAD + length
        if len(message) < _MESSAGE_HEAD:
            continue
        size = int.from_bytes(message[1:_MESSAGE_HEAD], "big")
        if message[0] != _CLIENT_HELLO or size > HELLO_BYTES_MAX:
            raise EgressDeniedError("expected a TLS ClientHello in a tunnel")
        if len(message) >= _MESSAGE_HEAD + size:
            return message[_MESSAGE_HEAD : _MESSAGE_HEAD + size]
    if data[:1] not in {b"", bytes([_HANDSHAKE])}:
        raise EgressDeniedError("expected TLS in a tunnel")
    if len(data) > 2 * HELLO_BYTES_MAX:
        raise EgressDeniedError("expected a TLS ClientHello in a tunnel")
    return None


def _server_name(message: bytes) -> str:
    fields = _Fields(message)
    fields.take(2 + 32)
    for length_bytes in (1, 2, 1):  # session id, cipher suites, compression methods
        fields.vector(length_bytes)
    extensions = _Fields(fields.vector(2) if fields else b"")
    names: list[bytes] = []
    while extensions:
        kind, content = extensions.number(2), extensions.vector(2)
        if kind in _ENCRYPTED_HELLOS:
            raise EgressDeniedError("TLS hides the server's name (ECH)")
        if kind == _SERVER_NAME:
            names += _names(content)
    if len(names) != 1:
        raise EgressDeniedError(f"TLS names {len(names)} servers, expected one (SNI)")
    return names[0].decode("ascii", "replace").lower()


def _names(content: bytes) -> list[bytes]:
    entries, names = _Fields(_Fields(content).vector(2)), []
    while entries:
        entries.take(1)
        names.append(entries.vector(2))
    return names


TUNNEL_OPEN = b"HTTP/1.1 200 Connection established\r\n\r\n"
_ADDRESS = re.compile(r"http://([^/?#]*)([^#]*)(?:#.*)?", re.IGNORECASE)
_CHUNKED = (b"transfer-encoding", b"chunked")
_LENGTH = b"content-length"
_NOT_FORWARDED = frozenset(
    {b"connection", b"proxy-connection", b"proxy-authorization", b"keep-alive", b"te", b"upgrade",
     b"host", b"trailer", b"transfer-encoding", b"expect"}
)  # fmt: skip
_REASONS = {400: "Bad Request", 403: "Forbidden", 429: "Too Many Requests", 502: "Bad Gateway"}


def requested_target(method: str, text: str) -> tuple[str, int, str]:
    """Return the name, port and path of a program's request.

    Raises:
        EgressDeniedError: It is neither `CONNECT name:port` nor a whole `http://` address.

    """
    if method == "CONNECT":
        return *parse_target(text), ""
    parts = _ADDRESS.fullmatch(text)
    if parts is None:
        raise EgressDeniedError("expected CONNECT, or a whole http:// address")
    host, path = parts.groups()
    return *parse_target(host, 80), path if path.startswith("/") else f"/{path}"


def check_host(request: h11.Request, name: str, port: int) -> None:
    """Check that a plain request's Host header means the same server as its address.

    Raises:
        EgressDeniedError: It names another one. `CONNECT` itself goes no further, so its is free.

    """
    if request.method == b"CONNECT":
        return
    meant = {name.encode(), f"{name}:{port}".encode()}
    for key, value in request.headers:
        if key == b"host" and value.strip().lower() not in meant:
            raise EgressDeniedError(f"the Host header names {value.decode('ascii', 'replace')!r}")


def forwarded(request: h11.Request, target: str, path: str) -> h11.Request:
    """Return the request as the host gets it: under the allowed name, without hop-by-hop headers.

    Args:
        request: The program's.
        target: `name:port` that a rule allowed.
        path: On that host.

    """
    is_chunked = any(key == _CHUNKED[0] for key, _ in request.headers)
    left_out = _NOT_FORWARDED | (_named_in_connection(request) - {_LENGTH})
    if is_chunked:
        left_out |= {_LENGTH}
    headers = [(b"host", target.removesuffix(":80").encode()), (b"connection", b"close")]
    headers += [(key, value) for key, value in request.headers if key not in left_out]
    headers += [_CHUNKED] if is_chunked else []
    return h11.Request(method=request.method, target=path, headers=headers)


def _named_in_connection(request: h11.Request) -> set[bytes]:
    """Return the headers that are meant only for the next hop (RFC 9110, 7.6.1)."""
    values = [value for key, value in request.headers if key == b"connection"]
    return {name.strip().lower() for value in values for name in value.split(b",")}


def refusal(status: int, text: str) -> bytes:
    """Return a complete answer from the proxy itself."""
    body = f"egress proxy: {text}\n".encode("ascii", "replace")
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: text/plain\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


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
