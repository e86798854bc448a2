"""Settings of the links: a TOML file with a table for each region that is behind one."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from penstock.infra.config.file import read_toml
from penstock.infra.config.regions import region_of, region_of_role
from penstock.infra.config.settings import RunConfig
from penstock.infra.stores.settings import StoreKind
from penstock.messages.errors import ConfigError


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


def read_links(path: Path) -> dict[str, LinkSection]:
    """Return the links of a file by region.

    Raises:
        ConfigError: The file is missing or not TOML, or a value is wrong; the text names the key.

    """
    links: dict[str, LinkSection] = {}
    for name, table in read_toml(path).items():
        try:
            links[name] = msgspec.convert(table, LinkSection)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}: {name}: {error}") from error
    return links


def check_links(config: RunConfig, links: Mapping[str, LinkSection]) -> None:
    """Check that all traffic of a region behind a link crosses the link.

    Raises:
        ConfigError: There is no such region, or some of its traffic would not.

    """
    if unknown := sorted(set(links) - {region.name for region in config.regions}):
        raise ConfigError(f"links: expected regions of the configuration, got {unknown}")
    text = f"regions {', '.join(links)} are behind links"
    if config.bus.servers:
        raise ConfigError(f"{text} to the run's own server: expected no bus.servers")
    if config.store.kind is not StoreKind.JETSTREAM:
        raise ConfigError(f'{text}, which only store.kind = "jetstream" crosses')
    check_processes(config.processes, links)


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
