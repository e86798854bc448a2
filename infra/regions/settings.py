"""Settings of a region's link, and the region's place while a run is up."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec

from penstock.messages.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Of a region, and of one of its replicas."""


class LinkSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The link between the trainer's site and one region, the same both ways."""

    bandwidth_mbit_s: Annotated[float, msgspec.Meta(gt=0, le=10_000)]
    rtt_ms: Annotated[float, msgspec.Meta(ge=0, le=5_000)]
    loss: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = 0.0
    """Share of packets lost, each way."""

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth in bytes."""
        return self.bandwidth_mbit_s * 1e6 / 8

    @property
    def delay_s(self) -> float:
        """Delay in one direction."""
        return self.rtt_ms / 2e3


class RegionPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a region with a link is while the run is up."""

    url: str
    """URL of its leaf node, including credentials."""
    namespace_pid: int = 0
    """A process in its network namespace; 0 if it has none."""

    @property
    def entrance(self) -> list[str]:
        """The start of a command line that runs a program in the region."""
        if not self.namespace_pid:
            return []
        return ["nsenter", f"--net=/proc/{self.namespace_pid}/ns/net", "--"]


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


def check_processes(processes: Mapping[str, Sequence[str]], linked: Iterable[str]) -> None:
    """Check that roles behind a link share their process with none outside the region.

    Raises:
        ConfigError: It does; the text names process, role and region.

    """
    far = set(linked)
    for name, specs in processes.items():
        for spec in specs:
            region = region_of_role(spec)
            if region in far and region_of(specs) != region:
                text = f"processes.{name}: {spec} is behind the link of region {region}"
                raise ConfigError(f"{text}: expected roles of that region alone, got {specs}")
