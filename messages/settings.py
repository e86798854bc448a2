"""Field types with constraints, for settings and messages.

The constraint on a single field is part of its type and is checked on decoding. Constraints across
fields are checked in the struct's `__post_init__`, which raises `ConfigError`.
"""

import ipaddress
import re
import sys
from collections.abc import Iterable
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from penstock.messages.errors import ConfigError

# Largest integer that every JSON reader represents exactly.
_INT_MAX = 2**53 - 1
# Largest finite float: no setting may be infinite.
_FLOAT_MAX = sys.float_info.max
PositiveInt = Annotated[int, Meta(ge=1, le=_INT_MAX)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=_INT_MAX)]
NumThreads = Annotated[int, Meta(ge=1, le=1024)]
"""Number of threads or concurrent tasks of one process."""
Finite = Annotated[float, Meta(ge=-_FLOAT_MAX, le=_FLOAT_MAX)]
PositiveFloat = Annotated[float, Meta(gt=0, le=_FLOAT_MAX)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=_FLOAT_MAX)]
AtLeastOne = Annotated[float, Meta(ge=1, le=_FLOAT_MAX)]
UnitInterval = Annotated[float, Meta(ge=0, le=1)]


REFERENCE = r"[A-Za-z_]\w{0,63}(?:\.[A-Za-z_]\w{0,63}){0,15}:[A-Za-z_]\w{0,63}"
"""Pattern of `module:name`, which refers to user code (`reading/references.py`)."""


def one_of(choices: Iterable[str]) -> Meta:
    """Return the constraint that a string is one of the choices, which its error lists."""
    return Meta(pattern=rf"^({'|'.join(map(re.escape, choices))})\Z")


def one_of_or_own(choices: Iterable[str]) -> Meta:
    """Return the constraint that a string is one of the choices or refers to user code."""
    return Meta(pattern=rf"^({'|'.join(map(re.escape, choices))}|{REFERENCE})\Z")


PlainText = list[Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:\-]{1,253}\Z")]]
"""Hosts off this machine to which a table lets secrets and content go without TLS."""


def is_loopback(host: str) -> bool:
    """Return whether a name or address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_encrypted(field: str, url: str, allowed: Iterable[str]) -> None:
    """Refuse an address to which secrets or content would go over a network in plain text.

    Args:
        field: Setting that holds the address, beside `allow_plain_text`; or an option.
        url: Address with its scheme.
        allowed: Hosts that `allow_plain_text` names.

    Raises:
        ConfigError: Neither encrypted, nor on this machine, nor allowed; or it holds a password.

    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.username or parts.password:
        raise ConfigError(f"{field}: expected no user and password in the address")
    if parts.scheme in ("https", "tls") or is_loopback(host) or host in allowed:
        return
    table, is_option = field.rpartition(".")[0], field.startswith("--")
    named = f'{table}.allow_plain_text = ["{host}"]'
    named = f"--allow-plain-text {host}" if is_option else named.removeprefix(".")
    text = f"expected TLS for an address off this machine, or {named}"
    raise ConfigError(f"{field}: {text}, got {parts.scheme}://{host}")
