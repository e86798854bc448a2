"""Settings of a gateway."""

from typing import Annotated

import msgspec

from penstock.messages.errors import ConfigError
from penstock.messages.generation import NEWEST, pinned_version
from penstock.messages.settings import (
    NonNegativeFloat,
    PlainText,
    PositiveFloat,
    PositiveInt,
    check_encrypted,
    is_loopback,
)
from penstock.messages.task import TEMPERATURE_MIN


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address and limits of one gateway."""

    host: str = "127.0.0.1"
    """Address to listen on. On any address but loopback, and through a proxy, the live page, its
    state and the metrics need an operator key, and TLS is expected."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8080
    """TCP port; 0 picks a free one. Several gateways on one host share a port: the kernel spreads
    connections over them."""
    tls_cert: str = ""
    """PEM file with the certificate that clients see; with it, the gateway speaks TLS alone."""
    tls_key: str = ""
    """PEM file with its key."""
    allow_plain_text: PlainText = []
    """Addresses of `host` on which keys and texts may pass without TLS, as behind a proxy that
    reaches the gateway over a network of its own."""
    model: str = "policy"
    """Model name that requests must use."""
    channel: str = NEWEST
    """Replicas that answer: those that follow `newest`, `stable` or `candidate`, or those pinned to
    one version, as in `version:7`."""
    context_tokens_max: PositiveInt = 1024
    """Context window in tokens: prompt plus reply."""
    reply_tokens_max: PositiveInt = 256
    """Maximum length of a reply in tokens; the default if a request sets no limit."""
    explore_temperature: Annotated[float, msgspec.Meta(ge=TEMPERATURE_MIN, le=2)] = 1.0
    """Temperature that replaces 0 in requests of keys with `explores`."""
    keys_file: str = ""
    """TOML file of bearer keys (see `keys.py`), in addition to those that the run makes. Changes
    take effect within seconds; an invalid file is ignored."""
    is_one_of_several: bool = False
    """Whether the limits of keys are shared with other gateways of the run; defaults to true if
    `[processes]` has several. Sharing costs each request two round trips to the event server."""
    body_bytes_max: PositiveInt = 2 << 20
    """Maximum size of a request body in bytes, before and after decompression."""
    num_requests_max: PositiveInt = 64
    """Maximum chat requests in progress over all keys; further ones get 503."""
    num_viewers_max: PositiveInt = 16
    """Maximum open live pages."""
    request_s_max: PositiveFloat = 120.0
    """Maximum duration of a chat request in seconds, retries included."""
    idle_s_max: PositiveFloat = 30.0
    """Seconds of silence from a generator before another one is tried."""
    num_connections_max: PositiveInt = 512
    """Maximum open connections; a further one closes the oldest without a request in progress."""
    header_s_max: PositiveFloat = 30.0
    """Maximum seconds for a client to send a request header, and for a connection to stay idle. A
    proxy in front should drop its idle connections sooner."""
    body_s_max: PositiveFloat = 30.0
    """Maximum seconds for a client to send a body."""
    write_s_max: PositiveFloat = 30.0
    """Maximum seconds for a client to read one chunk."""
    record_s_max: PositiveFloat = 10.0
    """Maximum seconds to wait for the log before the record of a reply goes to the disk spool."""
    spool_bytes_max: PositiveInt = 256 << 20
    """Maximum size of the disk spool in bytes; when it is full, requests get 503."""
    num_attempts_max: PositiveInt = 8
    """Maximum attempts to generate one reply."""
    retry_s: PositiveFloat = 0.25
    """Seconds to wait before the second attempt; doubles each time, up to 4 s."""
    drain_s_max: NonNegativeFloat = 10.0
    """Seconds that open requests have to finish after a stop."""

    def __post_init__(self) -> None:
        """Check fields against each other.

        Raises:
            ConfigError: The channel is unknown, or a certificate has no key.

        """
        pinned_version(self.channel)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("gateway: expected tls_cert and tls_key together")

    def check_encrypted(self) -> None:
        """Check an address before anything listens on it; readers of older runs need none.

        Raises:
            ConfigError: Keys and texts would pass in plain text.

        """
        host = f"[{self.host}]" if ":" in self.host else self.host
        check_encrypted("gateway.host", f"{self.scheme}://{host}", self.allow_plain_text)

    @property
    def scheme(self) -> str:
        """Of the gateway's URL."""
        return "https" if self.tls_cert else "http"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)
