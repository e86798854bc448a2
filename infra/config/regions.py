"""Regions by name: the region of a role, and the region's place while a run is up."""

import re
from collections.abc import Iterable

import msgspec

from penstock.messages.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""A region's name, or the name of one of its replicas."""


class RegionPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Place of a region that reaches the run's server in its own way, while the run is up."""

    url: str
    """URL of the bus as the region sees it, including credentials."""
    entrance: list[str] = []
    """Start of a command line that runs a program in the region, e.g. in its network namespace."""


def region_of_role(spec: str) -> str:
    """Return the region of a role, `role:region` or `role:region/name`; "" if it is in none."""
    return spec.partition(":")[2].partition("/")[0]


def replica_name(spec: str) -> str:
    """Return the name of a generator's replica, unique in the run and a token of subjects.

    Raises:
        ConfigError: Not `generator:region` or `generator:region/name`.

    Example: `replica_name("generator:eu") == "eu"`, `replica_name("generator:eu/a") == "eu.a"`.

    """
    region, slash, name = spec.partition(":")[2].partition("/")
    if _NAME.fullmatch(region) is None or (slash and _NAME.fullmatch(name) is None):
        expected = f"generator:REGION or generator:REGION/NAME, each {_NAME.pattern}"
        raise ConfigError(f"role {spec!r}: expected {expected}")
    return f"{region}.{name}" if slash else region


def region_of(specs: Iterable[str]) -> str:
    """Return the region that all of a process's roles are in; "" if there is none.

    Example: `region_of(["relay:eu", "generator:eu/a"]) == "eu"`.
    """
    found = {region_of_role(spec) for spec in specs}
    return found.pop() if len(found) == 1 else ""
