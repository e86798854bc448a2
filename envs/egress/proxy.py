"""HTTP proxy of one machine: `CONNECT` and plain requests to allowed hosts, all recorded.

The proxy resolves a name once and connects to an address that it has checked. It does not follow
redirects: a program that does sends another request. One connection carries one request, so nothing
for another host can follow it.

A TLS tunnel is opaque except for its ClientHello, which must name the allowed server: any other
name could reach another host behind the same address (domain fronting). A hello whose name is
missing or encrypted (ECH) cannot be compared and is refused. Hosts to which a rule gives an address
belong to the operator: their tunnels may carry anything.

Source: RFC 8446, 4.1.2; RFC 6066, 3; RFC 9849 (ECH).
"""

import asyncio
import logging
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

log = logging.getLogger(__name__)

HELLO_BYTES_MAX = 16 << 10
ALERT = bytes.fromhex("15030100020270")
"""Fatal TLS alert `unrecognized_name` (112)."""
_HANDSHAKE, _CLIENT_HELLO = 0x16, 1
_RECORD_HEAD, _MESSAGE_HEAD = 5, 4
_RECORD_BYTES_MAX = 1 << 14
_SERVER_NAME = 0
_ENCRYPTED_HELLOS = frozenset({0xFE0D, 0xFFCE})
"""ECH and its predecessor ESNI. Fake extensions (GREASE) look the same and are refused as well."""


class _FieldReader:
    """Reads length-prefixed fields; reading beyond the end denies the hello as malformed."""

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
    """Check that the first bytes of a tunnel name the allowed server.

    Returns:
        Whether the hello is complete; if not, call again with more bytes.

    Raises:
        EgressDeniedError: The bytes are not TLS, are too long, or name another server, no server,
            or an encrypted one.

    """
    message = _first_message(data)
    if message is None:
        return False
    asked = _server_name(message)
    if asked != name:
        raise EgressDeniedError(f"TLS names server {asked!r}, but the tunnel is to {name!r}")
    return True


def _first_message(data: bytes) -> bytes | None:
    """Return the first handshake message, joined from its records; None if it is incomplete."""
    message, at = b"", 0
    # A client may split its hello over any number of records; a check of one would be evaded.
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
    # Twice the message: its records have heads of their own.
    if len(data) > 2 * HELLO_BYTES_MAX:
        raise EgressDeniedError("expected a TLS ClientHello in a tunnel")
    return None


def _server_name(message: bytes) -> str:
    fields = _FieldReader(message)
    fields.take(2 + 32)  # version and random
    for length_bytes in (1, 2, 1):  # session id, cipher suites, compression methods
        fields.vector(length_bytes)
    extensions = _FieldReader(fields.vector(2) if fields else b"")
    names: list[bytes] = []
    while extensions:
        kind, content = extensions.number(2), extensions.vector(2)
        if kind in _ENCRYPTED_HELLOS:
            raise EgressDeniedError("TLS hides the server's name (ECH)")
        if kind == _SERVER_NAME:
            names += _server_names(content)
    # With several names it is up to the server which one counts.
    if len(names) != 1:
        raise EgressDeniedError(f"TLS names {len(names)} servers, expected one (SNI)")
    return names[0].decode("ascii", "replace").lower()


def _server_names(content: bytes) -> list[bytes]:
    entries, names = _FieldReader(_FieldReader(content).vector(2)), []
    while entries:
        entries.take(1)  # type of the name
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
    """Return the host name, port and path that a program's request asks for.

    Raises:
        EgressDeniedError: The request is neither `CONNECT name:port` nor an absolute `http://` URL.

    """
    if method == "CONNECT":
        return *parse_target(text), ""
    parts = _ADDRESS.fullmatch(text)
    if parts is None:
        raise EgressDeniedError("expected CONNECT or an absolute http:// URL")
    host, path = parts.groups()
    return *parse_target(host, 80), path if path.startswith("/") else f"/{path}"


def check_host(request: h11.Request, name: str, port: int) -> None:
    """Check that a plain request's Host header names the same server as its URL.

    Raises:
        EgressDeniedError: The header names another server.

    """
    # A CONNECT request ends at this proxy, so its Host header reaches nobody.
    if request.method == b"CONNECT":
        return
    allowed = {name.encode(), f"{name}:{port}".encode()}
    for key, value in request.headers:
        if key == b"host" and value.strip().lower() not in allowed:
            raise EgressDeniedError(f"the Host header names {value.decode('ascii', 'replace')!r}")


def forwarded(request: h11.Request, target: str, path: str) -> h11.Request:
    """Return the request to send upstream: under the allowed name, without hop-by-hop headers.

    Args:
        request: Request of the program.
        target: `name:port` that a rule allowed.
        path: Path and query on that host.

    """
    # With both a length and chunks, this proxy and the host could disagree where the request ends
    # (request smuggling): one framing goes on, and `Connection` cannot remove it.
    is_chunked = any(key == _CHUNKED[0] for key, _ in request.headers)
    left_out = _NOT_FORWARDED | (_named_in_connection(request) - {_LENGTH})
    if is_chunked:
        left_out |= {_LENGTH}
    headers = [(b"host", target.removesuffix(":80").encode()), (b"connection", b"close")]
    headers += [(key, value) for key, value in request.headers if key not in left_out]
    headers += [_CHUNKED] if is_chunked else []
    return h11.Request(method=request.method, target=path, headers=headers)


def _named_in_connection(request: h11.Request) -> set[bytes]:
    """Return the names of headers that only the next hop may see (RFC 9110, 7.6.1)."""
    values = [value for key, value in request.headers if key == b"connection"]
    return {name.strip().lower() for value in values for name in value.split(b",")}


def refusal(status: int, text: str) -> bytes:
    """Return a complete HTTP response of the proxy itself."""
    body = f"egress proxy: {text}\n".encode("ascii", "replace")
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: text/plain\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


TARGET_CHARACTERS_MAX = 256
HEAD_BYTES_MAX = 16 << 10
HELLO_PIECES_MAX = 64
"""Maximum pieces of a hello: each one is parsed again together with all before it."""
Resolve = Callable[[str, int], Awaitable[list[str]]]


class EgressFailedError(PenstockError, ConnectionError):
    """An allowed host did not answer."""


class EgressProxy:
    """Proxy for the programs of one machine.

    Args:
        rules: Allow-list of the task.
        limits: Limits of the machine.
        resolve: Resolver from name and port to addresses; defaults to the host's resolver.

    """

    def __init__(
        self, rules: tuple[EgressRule, ...], limits: EgressLimits, resolve: Resolve | None = None
    ) -> None:
        self.account = EgressAccount(limits)
        self._rules, self._limits = rules, limits
        self._resolve = resolve or resolve_on_host

    async def serve(self, client: GuestStream) -> None:
        """Serve one connection of a program.

        Raises:
            SandboxError: The program hung up; its attempt is recorded anyway.

        """
        entry = self.account.open()
        try:
            async with asyncio.timeout(self._limits.connection_s_max):
                await self._answer(client, entry)
        except EgressDeniedError as error:
            entry.is_allowed = False
            entry.reason = f"denied: {error}"
            log.debug("egress denied: %s", error)
            refused = refusal(403, f"{entry.target}: {error}")
            # Inside an open tunnel the program speaks TLS and would not understand HTTP.
            await client.send(ALERT if entry.is_answered else refused)
        except (EgressLimitError, EgressFailedError, TimeoutError) as error:
            entry.reason = str(error) or "the connection lasted too long"
            log.debug("egress connection ended: %s", entry.reason)
            # After the first bytes of an answer, an error text would look like part of it.
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
            return  # the program hung up before sending a request
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
                    first = await _read_hello(client, first, name)
                await self._tunnel(client, first, reader, writer, entry)
            else:
                onward = forwarded(request, entry.target, path)
                await self._forward(client, head, onward, writer, entry)
                await self._relay_to_client(client, reader, entry)
        except EgressDeniedError:  # it is an OSError as well
            raise
        except OSError as error:
            raise EgressFailedError(f"lost the host: {error}") from error
        finally:
            # Not `close`, which would keep the socket until a stalled host has read everything.
            writer.transport.abort()

    async def _locate(self, rule: EgressRule, name: str, port: int) -> str:
        if rule.address:
            return rule.address
        try:
            addresses = await self._resolve(name, port)
        except OSError as error:
            raise EgressFailedError(f"no such name: {error}") from error
        # Connect to a checked address, not to the name: a second lookup could return another one
        # (DNS rebinding).
        check_addresses(addresses)
        return addresses[0]

    async def _connect(
        self, address: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(self._limits.connect_s_max):
                return await asyncio.open_connection(address, port)
        except OSError as error:  # includes TimeoutError
            raise EgressFailedError(f"cannot connect: {error or 'no answer'}") from error

    async def _forward(
        self,
        client: GuestStream,
        head: h11.Connection,
        request: h11.Request,
        writer: asyncio.StreamWriter,
        entry: EgressEntry,
    ) -> None:
        """Send one request with its body upstream, and nothing that follows it."""
        onward = h11.Connection(h11.CLIENT)
        event: h11.Event = request
        while True:
            await self._send_upstream(onward.send(event) or b"", writer, entry)
            if isinstance(event, h11.EndOfMessage):
                return
            event = await _next_event(client, head)

    async def _send_upstream(
        self, data: bytes, writer: asyncio.StreamWriter, entry: EgressEntry
    ) -> None:
        # Counted before it is sent, so that no byte beyond the limit leaves the host.
        self.account.sent(entry, len(data))
        writer.write(data)
        await writer.drain()

    async def _relay_to_client(
        self, client: GuestStream, reader: asyncio.StreamReader, entry: EgressEntry
    ) -> None:
        while data := await reader.read(HEAD_BYTES_MAX):
            self.account.received(entry, len(data))
            entry.is_answered = True
            await client.send(data)

    async def _relay_upstream(
        self, client: GuestStream, data: bytes, writer: asyncio.StreamWriter, entry: EgressEntry
    ) -> None:
        await self._send_upstream(data, writer, entry)
        while data := await client.receive():
            await self._send_upstream(data, writer, entry)
        # Half-close: the host may still answer after the program has finished sending.
        writer.write_eof()

    async def _tunnel(
        self,
        client: GuestStream,
        first: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        entry: EgressEntry,
    ) -> None:
        """Carry bytes in both directions until the remote host closes the connection."""
        upstream = asyncio.ensure_future(self._relay_upstream(client, first, writer, entry))
        downstream = asyncio.ensure_future(self._relay_to_client(client, reader, entry))
        try:
            await asyncio.wait([upstream, downstream], return_when=asyncio.FIRST_COMPLETED)
            # An upstream that ended with an error raises here; one that ended well waits for the
            # rest of the answer.
            if not downstream.done():
                await upstream
            await downstream
        finally:
            upstream.cancel()
            downstream.cancel()
            await asyncio.gather(upstream, downstream, return_exceptions=True)


async def resolve_on_host(name: str, port: int) -> list[str]:
    """Resolve a name with the host's resolver; raise OSError if it does not exist."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


async def _read_hello(client: GuestStream, first: bytes, name: str) -> bytes:
    """Return the first bytes of a tunnel, up to a hello that names the allowed server.

    Raises:
        EgressDeniedError: The hello is refused, or the tunnel ends before it is complete.

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
