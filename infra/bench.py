"""`penstock bench ...`: speed as ratios in one run."""

import asyncio
import importlib
import inspect
import sys
from typing import Any

import msgspec

BENCHES = {
    "engine": ("penstock.infra.bench_engine", "bench_engine"),
    "bus": ("penstock.infra.bench_bus", "bench_bus"),
    "weights": ("penstock.infra.bench_weights", "bench_weights"),
    "sandbox": ("penstock.infra.bench_sandbox", "bench_sandbox"),
}


def bench(what: str, *, as_json: bool) -> int:
    """Run one benchmark and print its figures; with `as_json` as one last line."""
    module, name = BENCHES[what]
    result: Any = getattr(importlib.import_module(module), name)()
    if inspect.isawaitable(result):
        result = asyncio.run(_wait(result))
    encoded = msgspec.json.encode(result)
    text = encoded if as_json else msgspec.json.format(encoded, indent=2)
    sys.stdout.write(text.decode() + "\n")
    return 0


async def _wait(result: Any) -> Any:
    return await result
