"""`penstock bench ...`: speed as ratios in one run."""

import argparse
import asyncio
import importlib
import inspect
from typing import Any

from penstock.infra.commands.output import print_result
from penstock.messages.errors import ConfigError

BENCHES = ("engine", "bus", "weights", "sandbox", "search", "kernels", "recording", "scale")
"""Each is the function `bench_<name>` of the module `<name>` beside this one."""


def bench(arguments: argparse.Namespace) -> int:
    """Run one benchmark and print its figures; with `--json` they are one last line."""
    what, inputs = arguments.what, [p for p in (arguments.base, arguments.next) if p is not None]
    if inputs and (what != "weights" or len(inputs) != 2):
        raise ConfigError("bench: --base and --next go together, and only with weights")
    if arguments.run is not None:
        if what != "search":
            raise ConfigError("bench: --run goes only with search")
        inputs = [arguments.run]
    module = importlib.import_module(f"penstock.infra.bench.{what}")
    result: Any = getattr(module, f"bench_{what}")(*inputs)
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    print_result(result, as_json=arguments.json)
    return 0
