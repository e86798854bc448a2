"""`penstock bench ...`: speed as ratios in one run."""

import asyncio
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import msgspec

BENCHES = {
    "engine": ("penstock.infra.bench.engine", "bench_engine"),
    "bus": ("penstock.infra.bench.bus", "bench_bus"),
    "weights": ("penstock.infra.bench.weights", "bench_weights"),
    "search": ("penstock.infra.bench.search", "bench_search"),
    "sandbox": ("penstock.infra.bench.sandbox", "bench_sandbox"),
    "kernels": ("penstock.infra.bench.kernels", "bench_kernels"),
    "recording": ("penstock.infra.bench.recording", "bench_recording"),
}


def bench(what: str, *inputs: Path, as_json: bool) -> int:
    """Run one benchmark, on `inputs` if there are any, and print its figures.

    With `as_json` they are one last line.
    """
    module, name = BENCHES[what]
    result: Any = getattr(importlib.import_module(module), name)(*inputs)
    if inspect.isawaitable(result):
        result = asyncio.run(_wait(result))
    encoded = msgspec.json.encode(result)
    text = encoded if as_json else msgspec.json.format(encoded, indent=2)
    sys.stdout.write(text.decode() + "\n")
    return 0


async def _wait(result: Any) -> Any:
    return await result
