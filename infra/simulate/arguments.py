"""The command line of `penstock simulate`; what simulates is imported when it runs."""

import argparse

from penstock.infra.simulate.settings import Scenario


def add_simulation(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    default = Scenario()
    parser.add_argument("what", choices=["weights"])
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--steps", type=int, default=default.num_steps)
    parser.add_argument("--replicas", type=int, default=default.num_replicas)
    parser.add_argument("--ranks", type=int, default=default.num_ranks)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
