"""Settings of the NATS server or cluster: the table `[bus]` of a run's configuration."""

from typing import Annotated

import msgspec

from penstock.messages.errors import ConfigError
from penstock.messages.settings import NonNegativeFloat, NonNegativeInt, PlainText, PositiveInt

_SERVER = r"^(nats|tls)://([A-Za-z0-9_.\-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}\Z"
NUM_REPLICAS_MAX = 5
"""Bound of JetStream."""
SECRETS = ("nkey_seed_file", "credentials_file", "token_file")
"""Ways to prove who we are, at most one."""
FILES = (*SECRETS, "tls_ca", "tls_cert", "tls_key")
"""Fields that are paths on this host."""
INLINE_BYTES_MAX = 512 << 10
_EITHER = {"servers", "server_path", "inline_bytes", "allow_plain_text"}
"""Fields that an embedded server knows, too."""


class ArchiveSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the log's older part moves from the streams to the object store, and how long it stays.

    A stream is archived in any case when it is half full.
    """

    events_max: PositiveInt = 200_000
    """Events of a stream above which the older half is archived; a server needs about half a
    kilobyte of memory for each."""
    age_s_min: NonNegativeFloat = 3600.0
    """Seconds for which an event stays in its stream: until then a second copy of it is refused."""
    kept_s: NonNegativeFloat = 0.0
    """Seconds for which an archived event is kept; 0: for good. What is left then are counts, and
    the samples and erasures that lineage names. Steps that trained rollouts or requests of that
    time can then no longer be replayed."""


class BusSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Server or cluster that holds the log; by default one is embedded in the run.

    Secrets are in files, so that neither configuration nor command lines hold any.
    """

    servers: list[Annotated[str, msgspec.Meta(pattern=_SERVER)]] = []
    """Addresses, `nats://HOST:PORT` or `tls://HOST:PORT`; empty: embed a server."""
    nkey_seed_file: str = ""
    """File with the seed of an NKey user; needs the extra `nkeys`."""
    credentials_file: str = ""
    """File with a user's JWT and seed (`.creds`); needs the extra `nkeys`."""
    token_file: str = ""
    """File with a token."""
    tls_ca: str = ""
    """PEM file with the certificate authority of the servers; empty: this machine's."""
    tls_cert: str = ""
    """PEM file with our certificate, where servers ask for one."""
    tls_key: str = ""
    """PEM file with its key."""
    allow_plain_text: PlainText = []
    """Hosts of `servers` off this machine that may be reached without TLS."""
    num_replicas: Annotated[int, msgspec.Meta(ge=1, le=NUM_REPLICAS_MAX)] = 1
    """Servers that keep each stream and bucket; odd, at most as many as the cluster has."""
    max_bytes: NonNegativeInt = 0
    """Maximum storage that a stream reserves, for servers with less; 0: as specified, 8 GiB."""
    inline_bytes: Annotated[int, msgspec.Meta(ge=1, le=INLINE_BYTES_MAX)] = 64 << 10
    """Events above this size have their turn or files in the object store, and name them there."""
    server_path: str = ""
    """Executable to embed; empty: that of the installed wheel, then that in PATH."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        given = [name for name in SECRETS if getattr(self, name)]
        if len(given) > 1:
            raise ConfigError(f"bus: expected at most one of {', '.join(SECRETS)}, got {given}")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("bus: expected tls_cert and tls_key together")
        if self.num_replicas % 2 == 0:
            raise ConfigError(f"bus.num_replicas: expected 1, 3 or 5, got {self.num_replicas}")
        if not self.servers:
            self._check_embedded()
        elif self.server_path:
            raise ConfigError("bus.server_path: expected no servers with it")

    def _check_embedded(self) -> None:
        own = BusSection.__struct_fields__
        defaults = dict(zip(own, BusSection.__struct_defaults__, strict=True))
        for name in own:
            if name not in _EITHER and getattr(self, name) != defaults[name]:
                raise ConfigError(f"bus.{name}: expected bus.servers with it")
