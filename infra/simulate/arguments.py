"""The command line of `penstock simulate`; what simulates is imported when it runs."""

import argparse

from penstock.infra.simulate.fleet.command import add_fleet_simulation
from penstock.infra.simulate.settings import Scenario


def add_simulation(parser: argparse.ArgumentParser) -> None:
    """Declare what can be simulated, and what each takes."""
    what = parser.add_subparsers(required=True, dest="what", metavar="WHAT")
    _add_weights(what.add_parser("weights", help="versions to replicas over the world"))
    add_fleet_simulation(what.add_parser("sandboxes", help="a fleet's burst of machines"))


def _add_weights(parser: argparse.ArgumentParser) -> None:
    default = Scenario()
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--steps", type=int, default=default.num_steps)
    parser.add_argument("--replicas", type=int, default=default.num_replicas)
    parser.add_argument("--ranks", type=int, default=default.num_ranks)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
