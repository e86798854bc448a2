"""`regions`: a run whose regions are behind emulated links; else as `penstock run`."""

import argparse
import contextlib
import shutil
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

from tests.lab.regions.emulation import Emulation, Linked
from tests.lab.regions.settings import check_links, read_links

from penstock.infra.bus.server.kept import kept_server
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.cli import add_run_options
from penstock.infra.config.regions import RegionPlace
from penstock.infra.config.settings import RunConfig
from penstock.infra.run.command import run as run_command
from penstock.infra.run.runs import RunDir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `penstock run`, and the file of the links."""
    add_run_options(parser)
    text = "TOML of the links, a table per region (default: CONFIG's name with .links.toml)"
    parser.add_argument("--links", type=Path, metavar="FILE", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Run the configuration behind its links; a resumed run has the links that it had."""
    links: Path | None = arguments.links
    if links is None and not arguments.resume and arguments.config is not None:
        links = arguments.config.with_suffix(".links.toml")
    if links is not None:
        read_links(links)  # Before the run has a folder.
    return run_command(arguments, partial(server_behind_links, links))


@contextlib.asynccontextmanager
async def server_behind_links(
    links: Path | None, run_dir: RunDir, config: RunConfig
) -> AsyncGenerator[tuple[EmbeddedServer, dict[str, RegionPlace]]]:
    """Yield the run's server, and the places of the regions that have a link.

    Links come first, since the server listens on their address; leaf nodes, which dial it, last.

    Args:
        links: File of the links, kept in the run's folder; None: the one kept there.
        run_dir: The run's folder.
        config: Of the run.

    Raises:
        ConfigError: The links are wrong, or do not fit the configuration.
        LinkError: One could not be made, or broke.

    """
    kept = run_dir.path / "links.toml"
    if links is not None:
        shutil.copyfile(links, kept)
    sections = read_links(kept)
    check_links(config, sections)
    linked = [Linked(name=name, link=link) for name, link in sections.items()]
    emulation = Emulation(linked, run_dir.regions)
    binary = config.bus.server_path or None
    async with (
        emulation.links(partial(print, flush=True)) as listen,
        kept_server(run_dir.events, binary, leaf_listen=listen) as server,
        emulation.places(server, binary) as places,
    ):
        yield server, places
