"""`simulate-weights`: the scenarios, one after the other, as a table or as JSON."""

import argparse
import sys
import time
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from tests.lab.simulate.weights.settings import Mishap, Scenario
from tests.lab.simulate.weights.simulation import simulate

from penstock.infra.output import print_result


def scenarios(base: Scenario) -> dict[str, Scenario]:
    """Return the scenarios: without a mishap, and with one each."""
    steps = base.num_steps
    mishaps = {
        "as planned": Mishap(),
        "relay lost for 5 steps": Mishap(
            region="europe", relay_lost_at_step=2 * steps // 5, relay_lost_s=5 * base.step_s
        ),
        "slow region": Mishap(region="south", link_factor=0.1),
        "too slow region": Mishap(region="south", link_factor=0.06),
        "late joiners": Mishap(region="asia", join_at_step=4 * steps // 5, num_joiners=50),
    }
    return {name: msgspec.structs.replace(base, mishap=m) for name, m in mishaps.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `simulate-weights`."""
    default = Scenario()
    for name, value, text in (
        ("--seed", default.seed, "seed of all figures"),
        ("--steps", default.num_steps, "number of versions after version 0"),
        ("--replicas", default.num_replicas, "replicas of all regions, a multiple of their number"),
        ("--ranks", default.num_ranks, "ranks of the trainer; each uploads its own shard"),
    ):
        parser.add_argument(name, type=int, default=value, help=f"{text} (default: {value})")


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
    for name, scenario in scenarios(base).items():
        sys.stderr.write(f"simulating: {name}\n")
        found[name] = simulate(scenario)
    figures = {
        "scenario": msgspec.to_builtins(base),
        "scenarios": found,
        "cpu_s": round(time.process_time() - began_s, 1),
    }
    Console().print(_table(found))
    sys.stdout.write(_headline(found["as planned"]) + "\n")
    if arguments.json:
        print_result(figures, as_json=True)
    return 0


def _headline(figures: dict[str, Any]) -> str:
    """Return the figures of all regions without a mishap."""
    first = figures["first_snapshot_s"]
    return (
        f"as planned: the trainer uploads {figures['trainer_egress_gb_step']:g} GB per step of "
        f"{figures['full_snapshot_gb']:g} GB, and {figures['full_uploads_after_v0']} times the "
        f"whole after version 0;\na version is committed {figures['publish_s']['p50']:.1f} s after "
        "its weights are ready, by a manifest of at most "
        f"{figures['manifest_bytes_max']:,} bytes;\n"
        f"version 0 reaches half of {figures['replicas']} replicas in "
        f"{first['p50']:.0f} s and the last in {first['max']:.0f} s"
    )


def _table(found: dict[str, Any]) -> Table:
    head = ("scenario", "region", "p50 s", "p95 s", "max s", "behind", "fetched")
    table = Table(*head, box=None, title="seconds to a version, versions behind at most, bytes")
    for scenario, figures in found.items():
        for region, row in figures["regions"].items():
            spread = row["time_to_version_s"]
            times = (f"{spread[name]:.1f}" for name in ("p50", "p95", "max"))
            fetched = f"{row['fetched_of_published']:.3f}x"
            table.add_row(scenario, region, *times, str(row["lag_versions_max"]), fetched)
    return table
