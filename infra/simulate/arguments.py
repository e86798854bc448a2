"""The command line of `penstock simulate`; what simulates is imported when it runs."""

import argparse
import importlib

from penstock.infra.simulate.sandboxes.command import add_sandbox_simulation
from penstock.infra.simulate.weights.settings import Scenario


def add_simulation(parser: argparse.ArgumentParser) -> None:
    """Declare what can be simulated, and what each takes."""
    what = parser.add_subparsers(required=True, dest="what", metavar="WHAT")
    _add_weights(what.add_parser("weights", help="versions to replicas over the world"))
    add_sandbox_simulation(what.add_parser("sandboxes", help="a fleet's burst of machines"))


def run(arguments: argparse.Namespace) -> int:
    """Run one simulation."""
    return importlib.import_module(f"penstock.infra.simulate.{arguments.what}.command").run(
        arguments
    )


def _add_weights(parser: argparse.ArgumentParser) -> None:
    default = Scenario()
    for name, value, text in (
        ("--seed", default.seed, "decides every figure"),
        ("--steps", default.num_steps, "versions after version 0"),
        ("--replicas", default.num_replicas, "of all regions together, a multiple of their number"),
        ("--ranks", default.num_ranks, "of the trainer, each of which uploads its own shard"),
    ):
        parser.add_argument(name, type=int, default=value, help=f"{text}; default {value}")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
