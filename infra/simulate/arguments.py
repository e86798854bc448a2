"""The command line of `penstock simulate`; what simulates is imported when it runs."""

import argparse
import importlib

from penstock.infra.simulate.sandboxes.command import add_sandbox_simulation
from penstock.infra.simulate.users.command import add_user_simulation
from penstock.infra.simulate.weights.settings import Scenario


def add_simulation(parser: argparse.ArgumentParser) -> None:
    """Declare what can be simulated, and what each takes."""
    what = parser.add_subparsers(required=True, dest="what", metavar="WHAT")
    _add_weights(
        what.add_parser(
            "weights", help="distribution of weight versions to replicas in many regions"
        )
    )
    add_sandbox_simulation(
        what.add_parser("sandboxes", help="a burst of sandboxes over many hosts")
    )
    add_user_simulation(
        what.add_parser("users", help="users who rate replies, and a service that learns from them")
    )


def run(arguments: argparse.Namespace) -> int:
    """Run one simulation."""
    return importlib.import_module(f"penstock.infra.simulate.{arguments.what}.command").run(
        arguments
    )


def _add_weights(parser: argparse.ArgumentParser) -> None:
    default = Scenario()
    for name, value, text in (
        ("--seed", default.seed, "seed of all figures"),
        ("--steps", default.num_steps, "number of versions after version 0"),
        ("--replicas", default.num_replicas, "replicas of all regions, a multiple of their number"),
        ("--ranks", default.num_ranks, "ranks of the trainer; each uploads its own shard"),
    ):
        parser.add_argument(name, type=int, default=value, help=f"{text} (default: {value})")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
