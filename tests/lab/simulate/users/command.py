"""`python -m tests.lab simulate-users`: the command line."""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from tests.lab.simulate.users.results import Results
from tests.lab.simulate.users.settings import UsersScenario

from penstock.infra.output import print_result
from penstock.infra.run.runs import find_run
from penstock.messages.errors import ConfigError

Part = Callable[[UsersScenario], dict[str, Any]]
PARTS = ("learning", "attack", "aa", "latency")
FIGURES = (
    "trained_share", "acceptance_before", "acceptance_after", "attacker_shift",
    "aa_false_decisions", "feedback_to_served_s_p50", "feedback_to_served_s_p95",
    "feedback_to_stable_s_p50", "feedback_to_stable_s_p95", "failed_requests",
)  # fmt: skip
"""What the last line holds; null where the part that measures it did not run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    default = UsersScenario()
    parser.add_argument("--seed", type=int, default=default.seed, help="default: %(default)s")
    text = "run one part only (default: all, about 15 minutes on two quiet cores)"
    parser.add_argument("--part", choices=PARTS, help=text)
    text = "finished run that `latency` serves a copy of (default: the newest)"
    parser.add_argument("--run", default="latest", metavar="RUN", help=text)
    text = "folder of what is finished: started again, the simulation resumes (but for `latency`)"
    parser.add_argument("--results", type=Path, metavar="DIR", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Run the parts; print the figures.

    Raises:
        ConfigError: Users ask by the `openai` client, and it is not installed.

    """
    if importlib.util.find_spec("openai") is None:
        raise ConfigError("simulate-users: install the extra: pip install -e '.[lab]'")
    scenario = UsersScenario(seed=arguments.seed)
    parts: dict[str, Any] = {}
    for name, simulate in _parts(arguments, Results(scenario, arguments.results)).items():
        sys.stderr.write(f"simulating users: {name}\n")
        began_s = time.perf_counter()
        parts[name] = simulate(scenario)
        parts[name]["wall_s"] = round(time.perf_counter() - began_s, 1)
    result = summary(scenario, parts)
    Console().print(_table(result))
    if arguments.json:
        print_result(result, as_json=True)
    return 0


def _parts(arguments: argparse.Namespace, results: Results) -> dict[str, Part]:
    from tests.lab.simulate.users.aa import simulate_aa
    from tests.lab.simulate.users.attack import simulate_attack
    from tests.lab.simulate.users.latency import simulate_latency
    from tests.lab.simulate.users.learning import simulate_learning

    chosen = [name for name in PARTS if arguments.part in (None, name)]
    parts: dict[str, Part] = {
        "learning": _kept("learning", simulate_learning, results),
        "attack": lambda scenario: simulate_attack(scenario, results),
        "aa": _kept("aa", simulate_aa, results),
    }
    if "latency" in chosen:  # Before anything is simulated: there may be no such run.
        run = find_run(arguments.run, arguments.runs_dir)
        parts["latency"] = lambda scenario: simulate_latency(scenario, run)
    return {name: parts[name] for name in chosen}


def _kept(name: str, simulate: Part, results: Results) -> Part:
    """Return a part that is not run again where its figures are known."""

    def simulate_once(scenario: UsersScenario) -> dict[str, Any]:
        found = results.read(name, dict[str, Any])
        if found is None:
            found = simulate(scenario)
            results.write(name, found)
        elif not isinstance(failed := found.get("failed_requests", 0), int):
            text = f"expected a number, got {failed!r}"
            raise ConfigError(f"--results: {name}.json: failed_requests: {text}")
        return found

    return simulate_once


def summary(scenario: UsersScenario, parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all parts together; failed requests are added up."""
    figures: dict[str, Any] = dict.fromkeys(FIGURES)
    for found in parts.values():
        figures |= {name: found[name] for name in FIGURES if name in found}
    figures["failed_requests"] = sum(part.get("failed_requests", 0) for part in parts.values())
    return figures | {"scenario": msgspec.to_builtins(scenario), "parts": parts}


def _table(result: dict[str, Any]) -> Table:
    table = Table("", "", box=None)
    for name in FIGURES:
        if result[name] is not None:
            table.add_row(name, str(result[name]))
    return table
