"""The name in a TLS ClientHello, read from hostile bytes. Pure.

A tunnel's content is not seen, but its first message says which server is meant: another name than
the allowed one would reach another host behind the same address (fronting). A name that is
encrypted (ECH) cannot be compared, and neither can one that is not there.

Source: RFC 8446, 4.1.2; RFC 6066, 3; RFC 9849 (ECH).
"""

from penstock.envs.egress.rules import EgressDeniedError

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
