"""`penstock bench ...`: speed as ratios in one run; `learning`: what training gains."""

import argparse
import asyncio
import importlib
import inspect
from typing import Any

from penstock.infra.output import print_result
from penstock.messages.errors import ConfigError

_SPEED = ("engine", "bus", "weights", "sandbox", "search", "kernels", "recording", "scale", "ranks")
BENCHES = {name: f"penstock.infra.bench.{name}" for name in _SPEED}
BENCHES["learning"] = "penstock.infra.bench.learning.command"
"""Name -> module; each is its function `bench_<name>`."""


def bench(arguments: argparse.Namespace) -> int:
    """Run one benchmark and print its figures; with `--json` they are one last line."""
    what = arguments.what
    module = importlib.import_module(BENCHES[what])
    result: Any = getattr(module, f"bench_{what}")(*_inputs(arguments))
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    print_result(result, as_json=arguments.json)
    return 0


def _inputs(arguments: argparse.Namespace) -> list[Any]:
    """Return what the benchmark takes; options of other ones are refused."""
    what = arguments.what
    inputs: list[Any] = [p for p in (arguments.base, arguments.next) if p is not None]
    if inputs and (what != "weights" or len(inputs) != 2):
        raise ConfigError("bench: --base and --next go together, and only with weights")
    if arguments.run is not None:
        if what != "search":
            raise ConfigError("bench: --run goes only with search")
        inputs = [arguments.run]
    if what == "learning":
        return [arguments.output, arguments.only]
    if arguments.output is not None or arguments.only:
        raise ConfigError("bench: -o and --only go only with learning")
    return inputs
