"""Settings of rollouts played by external programs."""

from typing import Annotated

import msgspec

from penstock.messages.settings import PositiveFloat, PositiveInt


class RolloutsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address and limits of the service that hands out attempts at tasks."""

    is_external: bool = False
    """Whether external programs play all rollouts; rollout workers then start none."""
    host: str = "127.0.0.1"
    """Address to listen on. TLS is left to a proxy."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8090
    """TCP port; 0 picks a free one."""
    model: str = "policy"
    """Model name that requests must use."""
    num_concurrent: PositiveInt = 64
    """Attempts that may be open at once, taken or waiting to be taken."""
    lease_s: PositiveFloat = 60.0
    """Seconds of silence after which an attempt ends as an infrastructure failure."""
    wait_s_max: PositiveFloat = 30.0
    """Maximum seconds that one request waits for an attempt."""
    untaken_s_max: PositiveFloat = 3600.0
    """Seconds after which an attempt that no client takes ends as an infrastructure failure."""
    body_bytes_max: PositiveInt = 4 << 20
    """Maximum size of a request body in bytes."""
    num_connections_max: PositiveInt = 512
    """Maximum open connections; a further one closes the oldest without a request in progress."""
