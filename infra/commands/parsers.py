"""Helpers for the parsers of all commands."""

import argparse
from pathlib import Path
from typing import Any

Commands = Any
"""The result of `add_subparsers`, whose class is private to argparse."""


def add_run_name(parser: argparse.ArgumentParser) -> None:
    """Add the argument for a run."""
    parser.add_argument("run", nargs="?", default="latest", help="id or path (default: the newest)")


def add_host_file(parser: argparse.ArgumentParser) -> None:
    """Add the option for the file of a host that joins a run."""
    text = "TOML file with [bus] and [store], to reach a run that another host started"
    parser.add_argument("--config", type=Path, help=text)


def add_command(  # noqa: PLR0913 - a command is its name, its function and its help
    commands: Commands,
    name: str,
    command: str,
    help_text: str,
    *,
    of_run: bool = False,
    has_json: bool = False,
) -> argparse.ArgumentParser:
    """Add a command that runs `module:function` below `penstock.infra`."""
    text = help_text[0].upper() + help_text[1:] + "."
    parser = commands.add_parser(name, help=help_text, description=text)
    parser.set_defaults(command=command)
    if of_run:
        add_run_name(parser)
    if has_json:
        parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    return parser


def add_init(commands: Commands) -> None:
    """Register the command."""
    text = "write a project of your own, a copy of an example: tools, judges, tasks and a loss"
    project = add_command(commands, "init", "commands.init:init_command", text)
    project.add_argument("folder", type=Path, metavar="DIR", help="a new folder")
    project.add_argument(
        "--from",
        dest="example",
        choices=["own_parts", "quickstart"],
        default="own_parts",
        help="the example to copy (default: %(default)s)",
    )
