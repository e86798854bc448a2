"""`python -m tests.lab simulate-sandboxes`: the command line."""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from tests.lab.simulate.sandboxes.settings import BurstScenario

from penstock.actors.scheduler.host_registry import HostRegistry
from penstock.infra.output import print_result

ROWS = (
    "machines_per_s", "ready_s_p50", "ready_s_p95", "ready_s_p99", "all_live_s", "fetched_tb",
    "host_load_max_over_mean", "hosts_died", "machines_died", "machines_reaped",
    "groups_requested_again", "groups_lost", "groups_twice",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    default = BurstScenario()
    parser.add_argument("--seed", type=int, default=default.seed, help="default: %(default)s")
    parser.add_argument(
        "--machines", type=int, default=default.num_machines, help="default: %(default)s"
    )
    parser.add_argument("--hosts", type=int, default=default.num_hosts, help="default: %(default)s")
    failures = "hosts that die during the burst, on the real server (default: %(default)s)"
    parser.add_argument("--failures", type=int, default=default.num_failures, help=failures)
    only = "run one part only: over a real server, or on virtual time"
    parser.add_argument("--only", choices=["nats", "virtual"], help=only)


def run(arguments: argparse.Namespace) -> int:
    """Run the burst on virtual time and over a real server, by both policies; print the figures."""
    scenario = BurstScenario(
        seed=arguments.seed,
        num_machines=arguments.machines,
        num_hosts=arguments.hosts,
        num_failures=arguments.failures,
    )
    figures: dict[str, Any] = {"scenario": msgspec.to_builtins(scenario)}
    figures["choice_alone"] = time_choice(scenario)
    for part, simulate in _parts(arguments.only).items():
        for policy in ("affinity", "round_robin"):
            sys.stderr.write(f"simulating {scenario.num_machines} machines: {part}, {policy}\n")
            figures[f"{part}_{policy}"] = simulate(scenario, policy)
    Console().print(_table(figures))
    if arguments.json:
        print_result(figures, as_json=True)
    return 0


def _parts(only: str | None) -> dict[str, Callable[[BurstScenario, str], dict[str, Any]]]:
    from tests.lab.simulate.sandboxes.nats import place_over_nats
    from tests.lab.simulate.sandboxes.virtual import simulate_burst

    def over_nats(scenario: BurstScenario, policy: str) -> dict[str, Any]:
        return asyncio.run(place_over_nats(scenario, policy))

    parts = {"virtual": simulate_burst, "nats": over_nats}
    return {name: part for name, part in parts.items() if only in (None, name)}


def _table(figures: dict[str, Any]) -> Table:
    columns = [name for name in figures if name.startswith(("virtual", "nats"))]
    table = Table("", *columns, box=None)
    for row in ROWS:
        table.add_row(row, *(str(figures[name].get(row, "")) for name in columns))
    return table


def time_choice(scenario: BurstScenario) -> dict[str, Any]:
    """Place all groups without a bus: the cost of the choice alone."""
    registry, images = HostRegistry(random.Random(scenario.seed)), scenario.draw_images()
    for number in range(scenario.num_hosts):
        registry.report(f"h{number}", num_slots=scenario.num_slots, num_live=0, now=0.0)
    began_s = time.perf_counter()
    for number, image in enumerate(images):
        registry.place(
            str(number),
            num_machines=scenario.group_size,
            image=image,
            holder="run",
            lease_s=60.0,
            now=0.0,
        )
    wall_s = time.perf_counter() - began_s
    return {"groups": len(images), "groups_per_s": round(len(images) / wall_s)}
