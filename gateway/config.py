"""Settings of a gateway."""

import ipaddress
from typing import Annotated

import msgspec

from penstock.messages.generation import NEWEST, pinned_version
from penstock.messages.settings import NonNegativeFloat, PositiveFloat, PositiveInt
from penstock.messages.task import TEMPERATURE_MIN


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address and bounds of one gateway."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback, or through a proxy, the live page, its state and the
    metrics need a key, too; TLS is a proxy's work."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8080
    """0 takes a free one. Several gateways of one host share it: the kernel spreads connections."""
    model: str = "policy"
    """The one model name that requests may give."""
    channel: str = NEWEST
    """Which replicas answer: those that follow `newest`, `stable` or `candidate`, or those that
    serve one version, `version:7`."""
    context_tokens_max: PositiveInt = 1024
    """Prompt and reply together."""
    reply_tokens_max: PositiveInt = 256
    """Bound of one reply, and its length where the request names none."""
    explore_temperature: Annotated[float, msgspec.Meta(ge=TEMPERATURE_MIN, le=2)] = 1.0
    """Of requests at temperature 0 whose key `explores`."""
    keys_file: str = ""
    """TOML file of further bearer keys (see `keys.py`), besides those that the run makes. A change
    counts within seconds; a file that is wrong changes nothing."""
    is_one_of_several: bool = False
    """Whether limits of keys are shared with other gateways of the run; by default, if
    `[processes]` has several. It costs each request two round trips to the event server."""
    body_bytes_max: PositiveInt = 2 << 20
    num_requests_max: PositiveInt = 64
    """Chat requests in progress over all keys; one more is answered 503."""
    num_viewers_max: PositiveInt = 16
    """Open live pages."""
    request_s_max: PositiveFloat = 120.0
    """Longest chat request, retries included."""
    idle_s_max: PositiveFloat = 30.0
    """Longest silence of a generator before another is tried."""
    num_connections_max: PositiveInt = 512
    """Open connections; one more closes the oldest that has no request in progress."""
    header_s_max: PositiveFloat = 30.0
    """Longest that a client may take to send a request's header, and that a connection may stand
    idle: a proxy in front keeps its own idle connections for less."""
    body_s_max: PositiveFloat = 30.0
    """Longest that a client may take to send a body."""
    write_s_max: PositiveFloat = 30.0
    """Longest that a client may take to read one chunk."""
    record_s_max: PositiveFloat = 10.0
    """Longest wait for the log before a reply's record waits on disk instead."""
    spool_bytes_max: PositiveInt = 256 << 20
    """Records that wait on disk for the log; beyond it requests are answered 503."""
    num_attempts_max: PositiveInt = 8
    """Generators tried for one request."""
    retry_s: PositiveFloat = 0.25
    """Pause before the second attempt; doubles, up to 4 s."""
    drain_s_max: NonNegativeFloat = 10.0
    """Time that open requests have to end after a stop."""

    def __post_init__(self) -> None:
        """Check the channel.

        Raises:
            ConfigError: No such channel.

        """
        pinned_version(self.channel)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
