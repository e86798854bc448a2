"""Machines: boot, first exec, requests, Python, memory; next to the same programs on the host."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from penstock.envs.microvm.machine import GuestSandbox
from penstock.envs.microvm.pool import Pool
from penstock.envs.microvm.uml import UmlBackend

BOOTS = 40
POOL_RUNS = 100
REPEATS = 100
TIMEOUT_S = 30.0
PYTHON = ("python3", "-I", "-S", "-B", "-c", "1")


def _percentile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


async def _times_ms(work: Callable[[], Awaitable[object]], repeats: int) -> list[float]:
    times: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        await work()
        times.append((time.perf_counter() - started) * 1000)
    return times


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in listing.read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


def _pss_mib(machine: GuestSandbox) -> float:
    """Return the memory of a machine's processes, shared pages in proportion."""
    kib = 0
    for pid in (machine.process.pid, *_descendants(machine.process.pid)):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        kib += sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    return kib / 1024


async def _boots(backend: UmlBackend) -> dict[str, float]:
    boot_ms: list[float] = []
    python_ms: list[float] = []
    pss_mib: list[float] = []
    for _ in range(BOOTS):
        machine = await backend.start(cpu=0, timeout_s=TIMEOUT_S)
        boot_ms.append(machine.info.boot_ms)
        pss_mib.append(_pss_mib(machine))
        python_ms += await _times_ms(lambda m=machine: m.exec(PYTHON, timeout_s=TIMEOUT_S), 1)
        await machine.close()
    return {
        "boot_ms_p50": _percentile(boot_ms, 50),
        "boot_ms_p99": _percentile(boot_ms, 99),
        "idle_pss_mib_p50": _percentile(pss_mib, 50),
        "python_first_ms_p50": _percentile(python_ms, 50),
    }


async def _requests(backend: UmlBackend) -> dict[str, float]:
    machine = await backend.start(cpu=0, timeout_s=TIMEOUT_S)
    files = {"data": bytes(100_000)}
    pings = await _times_ms(machine.ping, REPEATS)
    trues = await _times_ms(lambda: machine.exec(["true"], timeout_s=TIMEOUT_S), REPEATS)
    pythons = await _times_ms(lambda: machine.exec(PYTHON, timeout_s=TIMEOUT_S), REPEATS // 4)
    writes = await _times_ms(lambda: machine.write_files(files), REPEATS // 4)
    await machine.close()
    return {
        "ping_ms_p50": _percentile(pings, 50),
        "exec_true_ms_p50": _percentile(trues, 50),
        "python_again_ms_p50": _percentile(pythons, 50),
        "write_mb_s_p50": 100.0 / _percentile(writes, 50),
    }


async def _pool(backend: UmlBackend) -> dict[str, float]:
    async def episode(pool: Pool) -> None:
        lease = await pool.acquire(TIMEOUT_S)
        await lease.sandbox.exec(["true"], timeout_s=TIMEOUT_S)
        await pool.release(lease.lease_id)

    started = time.perf_counter()
    async with Pool(backend, size=4, live_max=16) as pool, asyncio.TaskGroup() as group:
        for _ in range(POOL_RUNS):
            group.create_task(episode(pool))
    return {"machines_with_exec_per_s": POOL_RUNS / (time.perf_counter() - started)}


def _on_host() -> dict[str, float]:
    times: list[float] = []
    for _ in range(REPEATS // 4):
        started = time.perf_counter()
        subprocess.run([sys.executable, *PYTHON[1:]], check=True, timeout=TIMEOUT_S)
        times.append((time.perf_counter() - started) * 1000)
    return {"host_python_ms_p50": _percentile(times, 50)}


async def bench_sandbox() -> dict[str, Any]:
    """Measure the `uml` backend.

    Returns:
        Milliseconds, machines a second, MiB; `python_again_ratio` is the machine's time of an
        empty Python program to the host's.

    Raises:
        BackendUnavailable: The kernel and the image were not built.

    """
    backend = UmlBackend()
    figures = {**await _boots(backend), **await _requests(backend), **await _pool(backend)}
    figures |= _on_host()
    figures["python_again_ratio"] = figures["python_again_ms_p50"] / figures["host_python_ms_p50"]
    named = {name: round(value, 3) for name, value in figures.items()}
    return {"backend": backend.name, "kernel": backend.assets.kernel_version, **named}
