"""Copies of machines: from the template, from a checkpoint, and what saving one costs it."""

import asyncio
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import cast

from penstock.envs.microvm.checkpoint import MANIFEST, MachineCheckpoint
from penstock.envs.microvm.qemu.backend import QemuTcgBackend
from penstock.envs.sandbox import SandboxBackend
from penstock.messages.reading.parsing import parse_json
from penstock.messages.telemetry import percentile

TIMEOUT_S = 300.0
REPEATS = 8
NUM_BRANCHES = 16


async def bench_saving(opened: SandboxBackend) -> dict[str, float]:
    """Copy machines and save them; the template exists already.

    Returns:
        In ms, medians: `clone` (of the template, with a QEMU of its own), `clone_prepared` (made
        beforehand), `checkpoint_pause` (the machine stands still) and `checkpoint` (all of it),
        `branch` (of a checkpoint at hand), `restore` (of one on disk alone). In s: `branches_16`,
        `branches_16_prepared` (16 copies of one state, until the last answers).

    """
    backend = cast(QemuTcgBackend, opened)
    times: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for number in range(REPEATS):
            await _once(backend, Path(folder) / str(number), times)
        saved = Path(folder) / str(REPEATS - 1)
        branches_s = await _branches_s(backend, saved)
        await backend.prepare(NUM_BRANCHES, saved)
        prepared_s = await _branches_s(backend, saved)
    figures = {f"{name}_ms_p50": percentile(values, 50) for name, values in times.items()}
    figures["checkpoint_pause_ms"] = figures.pop("checkpoint_pause_ms_p50")
    return figures | {"branches_16_s": branches_s, "branches_16_prepared_s": prepared_s}


async def _once(backend: QemuTcgBackend, saved: Path, times: dict[str, list[float]]) -> None:
    machine = await backend.start(timeout_s=TIMEOUT_S)
    times["clone"].append(machine.info.boot_ms)
    await machine.exec(["python3", "-c", "1"], timeout_s=TIMEOUT_S)
    began = time.perf_counter()
    await machine.checkpoint(saved)
    times["checkpoint"].append((time.perf_counter() - began) * 1000)
    times["checkpoint_pause"].append(await asyncio.to_thread(_pause_ms, saved))
    await machine.close()
    elsewhere = type(backend)()
    for name, source in (("branch", backend), ("restore", elsewhere)):
        copy = await source.restore(saved, timeout_s=TIMEOUT_S)
        times[name].append(copy.info.boot_ms)
        await copy.close()
    await backend.prepare(1)
    prepared = await backend.start(timeout_s=TIMEOUT_S)
    times["clone_prepared"].append(prepared.info.boot_ms)
    await prepared.close()


def _pause_ms(folder: Path) -> float:
    return parse_json((folder / MANIFEST).read_bytes(), MachineCheckpoint, MANIFEST).pause_ms


async def _branches_s(backend: QemuTcgBackend, saved: Path) -> float:
    began = asyncio.get_running_loop().time()
    starts = (backend.restore(saved, timeout_s=TIMEOUT_S) for _ in range(NUM_BRANCHES))
    machines = await asyncio.gather(*starts)
    elapsed_s = asyncio.get_running_loop().time() - began
    for machine in machines:
        await machine.close()
    return elapsed_s
