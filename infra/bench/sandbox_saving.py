"""Copies of machines: from the template, from a checkpoint, and what saving one costs it."""

import asyncio
import tempfile
from pathlib import Path
from typing import cast

import msgspec

from penstock.envs.microvm.checkpoint import MANIFEST, Checkpoint
from penstock.envs.sandbox import Backend, SavingBackend
from penstock.infra.bench.measuring import percentile

TIMEOUT_S = 300.0
REPEATS = 8
NUM_BRANCHES = 16


async def bench_saving(opened: Backend) -> dict[str, float]:
    """Return the times of copying and saving, in ms; the template exists already."""
    backend = cast(SavingBackend, opened)
    clone_ms: list[float] = []
    pause_ms: list[float] = []
    restore_ms: list[float] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for number in range(REPEATS):
            saved = Path(folder) / str(number)
            machine = await backend.start(timeout_s=TIMEOUT_S)
            clone_ms.append(machine.info.boot_ms)
            await machine.exec(["python3", "-c", "1"], timeout_s=TIMEOUT_S)
            await machine.checkpoint(saved)
            pause_ms.append(await asyncio.to_thread(_pause_ms, saved))
            await machine.close()
            copy = await backend.restore(saved, timeout_s=TIMEOUT_S)
            restore_ms.append(copy.info.boot_ms)
            await copy.close()
        branches_s = await _branches_s(backend, Path(folder) / "0")
    return {
        "clone_ms_p50": percentile(clone_ms, 50),
        "checkpoint_pause_ms": percentile(pause_ms, 50),
        "restore_ms_p50": percentile(restore_ms, 50),
        "branches_16_s": branches_s,
    }


def _pause_ms(folder: Path) -> float:
    return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Checkpoint).pause_ms


async def _branches_s(backend: SavingBackend, saved: Path) -> float:
    began = asyncio.get_running_loop().time()
    starts = (backend.restore(saved, timeout_s=TIMEOUT_S) for _ in range(NUM_BRANCHES))
    machines = await asyncio.gather(*starts)
    elapsed_s = asyncio.get_running_loop().time() - began
    for machine in machines:
        await machine.close()
    return elapsed_s
