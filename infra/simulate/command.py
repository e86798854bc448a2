"""`penstock simulate weights`: the scenarios, one after the other, as a table or as JSON."""

import argparse
import sys
import time
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.infra.simulate.settings import Mishap, Scenario
from penstock.infra.simulate.simulation import simulate

SCENARIOS: dict[str, Mishap] = {
    "as planned": Mishap(),
    "relay lost for 5 steps": Mishap(region="europe", relay_lost_at_step=20, relay_lost_s=300.0),
    "slow region": Mishap(region="south", wire_factor=0.1),
    "late joiners": Mishap(region="asia", join_at_step=40, num_joiners=50),
}


def run(arguments: argparse.Namespace) -> int:
    """Simulate every scenario and print the figures."""
    base = Scenario(
        seed=arguments.seed,
        num_steps=arguments.steps,
        num_replicas=arguments.replicas,
        num_ranks=arguments.ranks,
    )
    began_s = time.process_time()
    found: dict[str, Any] = {}
    for name, mishap in SCENARIOS.items():
        sys.stderr.write(f"simulating: {name}\n")
        found[name] = simulate(msgspec.structs.replace(base, mishap=mishap))
    figures = {
        "scenario": msgspec.to_builtins(base),
        "scenarios": found,
        "cpu_s": round(time.process_time() - began_s, 1),
    }
    Console().print(_table(found))
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
    return 0


def _table(found: dict[str, Any]) -> Table:
    table = Table("scenario", "region", "time to version p50, p95, max (s)", "behind, most",
                  "fetched of published", "GB to a replica", box=None)  # fmt: skip
    for scenario, figures in found.items():
        for region, row in figures["regions"].items():
            spread = row["time_to_version_s"]
            table.add_row(
                scenario,
                region,
                " ".join(f"{spread[name]:8.1f}" for name in ("p50", "p95", "max")),
                str(row["lag_versions_max"]),
                f"{row['fetched_of_published']:.3f}",
                f"{row['fan_out_gb_replica']:,.0f}",
            )
    return table
