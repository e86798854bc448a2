"""How to reach a NATS server or cluster: addresses, who we are, TLS, and what streams reserve."""

import base64
import ssl
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from nats.aio.client import Client

from penstock.actors.runtime.files import read_small
from penstock.infra.bus.settings import FILES, SECRETS, BusSection
from penstock.messages.errors import BusError, ConfigError, PenstockError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.settings import check_encrypted

OWNER = "launcher"
"""User of an embedded server who may do everything: the launcher, and the run's commands."""
INBOXES = "_INBOX"
"""First word of all inboxes; a user's own bear its name next."""
_JWT = "NATS USER JWT"
_FILE_BYTES_MAX = 1 << 20


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What a connection needs; made by `open_access`, or from an embedded server's address."""

    servers: list[str]
    options: dict[str, Any] = {}
    """Options of the client that hold secrets: never printed."""
    section: BusSection = BusSection()

    def __repr__(self) -> str:
        return f"Access({self.place})"

    @property
    def place(self) -> str:
        """The servers, for error texts."""
        return ", ".join(self.servers)

    @property
    def inbox(self) -> str:
        """Prefix of our inboxes."""
        return self.options.get("inbox_prefix", INBOXES.encode()).decode()

    @property
    def may_provision(self) -> bool:
        """Whether we may create streams: on an embedded server, its owner alone."""
        return self.options.get("user", OWNER) == OWNER

    @property
    def wants_tls(self) -> bool:
        """Whether a server that does not encrypt is refused."""
        tls = self.section.tls_ca or self.section.tls_cert
        return bool(tls) or any(server.startswith("tls://") for server in self.servers)

    def failure(self, error: BaseException) -> PenstockError:
        """Return the error that says what to change, and where, for one of the client's."""
        text = str(error) or type(error).__name__
        if not self.section.servers:
            return BusError(f"no NATS server at {self.place}: {text}")
        if isinstance(error, PermissionError):
            return ConfigError(f"{self._secret()}: expected what {self.place} accepts: {text}")
        if isinstance(error, ssl.SSLError | PlainServerError):
            return ConfigError(f"{_tls_field(text)}: {self.place}: {text}")
        return ConfigError(f"bus.servers: expected NATS servers at {self.place}: {text}")

    def _secret(self) -> str:
        given = [name for name in SECRETS if getattr(self.section, name)]
        return f"bus.{given[0]}" if given else f"bus: one of {', '.join(SECRETS)}"


class PlainServerError(ConnectionError):
    """A server offers no TLS where it is expected; nothing was sent to it."""


class TlsClient(Client):
    """A client that sends its credentials only over TLS: the library's falls back to plain text."""

    def _connect_command(self) -> bytes:
        if not self._server_info.get("tls_required"):
            raise PlainServerError("expected a server that requires TLS, this one does not")
        return super()._connect_command()


def inbox_prefix(user: str) -> str:
    """Return the prefix of a user's inboxes on an embedded server."""
    return f"{INBOXES}.{user}"


def as_access(where: str | Access) -> Access:
    """Return the access to an embedded server's address, whose credentials are part of it.

    They become options: those in the address are not sent to servers discovered later.
    """
    if isinstance(where, Access):
        return where
    parts = urlsplit(where)
    options: dict[str, Any] = {}
    if parts.username and parts.password:
        options = {"user": parts.username, "password": parts.password}
        # Where a user may read one prefix alone, no other process can read its replies.
        options["inbox_prefix"] = inbox_prefix(parts.username).encode()
    elif parts.username:
        options = {"token": parts.username}
    return Access(servers=[f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"], options=options)


def open_access(section: BusSection) -> Access:
    """Read the files that `[bus]` names.

    Raises:
        ConfigError: One is missing, unreadable, or not what it should be, or a server off this
            machine would be reached without TLS; the text names the field.

    """
    if not section.tls_ca and not section.tls_cert:  # With these a plain server is refused.
        for server in section.servers:
            check_encrypted("bus.servers", server, section.allow_plain_text)
    for name in FILES:
        if path := getattr(section, name):
            _read(name, path)
    options = _secret_options(section)
    if section.tls_ca or section.tls_cert:
        options["tls"] = _tls(section)
    return Access(servers=list(section.servers), options=options, section=section)


def _read(name: str, path: str) -> str:
    try:
        text = read_small(Path(path), _FILE_BYTES_MAX).decode("ascii").strip()
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"bus.{name}: {path}: expected a readable text file: {error}") from error
    if not text:
        raise ConfigError(f"bus.{name}: {path}: expected a secret or certificate, it is empty")
    return text


def _secret_options(section: BusSection) -> dict[str, Any]:
    if section.token_file:
        return {"token": _read("token_file", section.token_file)}
    if section.nkey_seed_file:
        _check_seed("nkey_seed_file", section.nkey_seed_file)
        return {"nkeys_seed": section.nkey_seed_file}
    if section.credentials_file:
        _check_credentials(section.credentials_file)
        return {"user_credentials": section.credentials_file}
    return {}


def _check_seed(name: str, path: str) -> None:
    _require_nkeys(name)
    import nkeys  # pyright: ignore[reportMissingTypeStubs]

    try:
        nkeys.from_seed(bytearray(_read(name, path).encode()))  # pyright: ignore[reportUnknownMemberType]
    except Exception as error:  # The library raises errors of several families.
        text = f"bus.{name}: {path}: expected the seed of a user, SU..."
        raise ConfigError(f"{text}: {type(error).__name__}") from error


def _check_credentials(path: str) -> None:
    """Refuse a file without JWT and seed, and a JWT that has expired."""
    _require_nkeys("credentials_file")
    lines = _read("credentials_file", path).splitlines()
    begins = [number for number, line in enumerate(lines) if f"BEGIN {_JWT}" in line]
    has_seed = any("BEGIN USER NKEY SEED" in line for line in lines)
    field = f"bus.credentials_file: {path}"
    if not begins or begins[0] + 1 >= len(lines) or not has_seed:
        raise ConfigError(f"{field}: expected a user's JWT and seed, as `nsc generate creds` gives")
    try:
        claims = lines[begins[0] + 1].split(".")[1]
        expires = _decode_claims(claims).get("exp", 0)
    except (IndexError, ValueError) as error:
        raise ConfigError(f"{field}: expected a JWT: {error}") from error
    if expires and expires <= time.time():
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(expires))
        raise ConfigError(f"{field}: expired at {at}: expected credentials that are valid")


def _decode_claims(text: str) -> dict[str, Any]:
    data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    return parse_json(data, dict[str, Any], "JWT")


def _require_nkeys(name: str) -> None:
    if find_spec("nkeys") is None:
        raise ConfigError(f"bus.{name}: install the extra: pip install -e '.[nkeys]'")


def _tls(section: BusSection) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=section.tls_ca or None)
    except (OSError, ssl.SSLError) as error:
        text = f"bus.tls_ca: {section.tls_ca}: expected certificates in PEM: {error}"
        raise ConfigError(text) from error
    if section.tls_cert:
        try:
            context.load_cert_chain(section.tls_cert, section.tls_key)
        except (OSError, ssl.SSLError) as error:
            text = f"bus.tls_cert, bus.tls_key: {section.tls_cert}, {section.tls_key}"
            raise ConfigError(f"{text}: expected a certificate and its key: {error}") from error
    return context


def _tls_field(text: str) -> str:
    """Return the field that a failure of TLS is about."""
    if "CERTIFICATE_REQUIRED" in text.upper().replace(" ", "_"):
        return "bus.tls_cert"
    return "bus.tls_ca" if "verify failed" in text else "bus.servers"
