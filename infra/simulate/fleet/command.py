"""`penstock simulate sandboxes`: the command line."""

import argparse
import asyncio
import sys
from typing import Any

import msgspec

from penstock.infra.simulate.fleet.settings import FleetScenario


def add_fleet_simulation(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    default = FleetScenario()
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--machines", type=int, default=default.num_machines)
    parser.add_argument("--hosts", type=int, default=default.num_hosts)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Simulate the burst, then place the same groups over a real server; print the figures."""
    from penstock.infra.simulate.fleet.nats import place_in_memory, place_over_nats
    from penstock.infra.simulate.fleet.simulation import simulate_fleet

    scenario = FleetScenario(
        seed=arguments.seed, num_machines=arguments.machines, num_hosts=arguments.hosts
    )
    sys.stderr.write(f"simulating {scenario.num_machines} machines on {scenario.num_hosts} hosts\n")
    figures: dict[str, Any] = {"scenario": msgspec.to_builtins(scenario)}
    figures["simulated"] = _shown("simulated", simulate_fleet(scenario))
    figures["choice_alone"] = _shown("choice_alone", place_in_memory(scenario))
    figures["nats"] = _shown("nats", asyncio.run(place_over_nats(scenario)))
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
    return 0


def _shown(part: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Print a part's figures as soon as there are some."""
    for name, value in figures.items():
        sys.stdout.write(f"{part:<14}{name:<26}{value}\n")
    sys.stdout.flush()
    return figures
