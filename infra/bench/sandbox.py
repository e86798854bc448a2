"""Machines: ready, first exec, memory, requests, agents' steps; beside bubblewrap and the host.

Every backend that runs guest code here is measured in the same run: `process` is bubblewrap
alone, `native` the same programs on the host. Ratios between them are worth more than times.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import Any, cast

from penstock.envs.microvm.machine import GuestSandbox
from penstock.envs.microvm.pool import Pool
from penstock.envs.microvm.probe import probe
from penstock.envs.sandbox import Backend, Capability, open_backend
from penstock.infra.bench.measuring import percentile, times_ms
from penstock.infra.bench.sandbox_saving import bench_saving
from penstock.infra.bench.sandbox_steps import bench_native, steps_per_s

TIMEOUT_S = 120.0
PYTHON = ("python3", "-I", "-S", "-B", "-c", "1")
NUM_BOOTS = {"qemu-tcg": 12}
NUM_BOOTS_DEFAULT = 60
NUM_LIVE = {"qemu-tcg": 8}
NUM_LIVE_DEFAULT = 100
LIVE_VARIABLE = "PENSTOCK_BENCH_LIVE"
"""Machines to hold at once, where the host has memory for more: 500 take 6 GB."""


async def bench_sandbox() -> dict[str, Any]:
    """Measure every backend that the probe finds.

    Returns:
        By backend: `ready_ms_*` (start to the first answer), `vms_per_s` (through the pool, with a
        first exec), `live_max` (held at once, all answering), `pss_mib` (idle, of one of those),
        `ping_us_p50`, `exec_ms_p50` (`true`), `python_ms_p50`, `agent_steps_per_s` (eight agents
        search, edit, test and commit), and where machines can be saved `clone_ms_p50`,
        `checkpoint_pause_ms`, `restore_ms_p50`.

    """
    found: dict[str, Any] = {}
    for result in await probe():
        if result.available:
            backend = open_backend(result.name, allow_process=True)
            found[result.name] = await _bench_backend(backend)
    found["native"] = await bench_native()
    return found


async def _bench_backend(backend: Backend) -> dict[str, float]:
    figures = await _boots(backend)
    figures |= await _rate(backend)
    figures |= await _live(backend)
    figures |= await _requests(backend)
    figures["agent_steps_per_s"] = await steps_per_s(backend)
    if Capability.CHECKPOINT in backend.capabilities:
        figures |= await bench_saving(backend)
    return {name: round(value, 3) for name, value in figures.items()}


def _count(table: dict[str, int], backend: Backend, default: int) -> int:
    return table.get(backend.name, default)


async def _start(backend: Backend, cpu: int | None = None) -> GuestSandbox:
    return cast(GuestSandbox, await backend.start(cpu=cpu, timeout_s=TIMEOUT_S))


async def _boots(backend: Backend) -> dict[str, float]:
    cpus = sorted(os.sched_getaffinity(0))
    await (await _start(backend)).close()  # a template is made once, and is no boot
    ready_ms: list[float] = []
    for n in range(_count(NUM_BOOTS, backend, NUM_BOOTS_DEFAULT)):
        machine = await _start(backend, cpus[n % len(cpus)])
        ready_ms.append(machine.info.boot_ms)
        await machine.close()
    return {"ready_ms_p50": percentile(ready_ms, 50), "ready_ms_p99": percentile(ready_ms, 99)}


async def _rate(backend: Backend) -> dict[str, float]:
    num_machines = _count(NUM_BOOTS, backend, NUM_BOOTS_DEFAULT) * 2

    async def episode(pool: Pool) -> None:
        lease = await pool.acquire(TIMEOUT_S, timeout_s=TIMEOUT_S)
        await lease.sandbox.exec(["true"], timeout_s=TIMEOUT_S)
        await pool.release(lease.lease_id)

    began = time.perf_counter()
    async with (
        Pool(backend, size=4, live_max=16, boot_timeout_s=TIMEOUT_S) as pool,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(num_machines):
            group.create_task(episode(pool))
    return {"vms_per_s": num_machines / (time.perf_counter() - began)}


async def _live(backend: Backend) -> dict[str, float]:
    num_machines = int(os.environ.get(LIVE_VARIABLE, "0"))
    num_machines = num_machines or _count(NUM_LIVE, backend, NUM_LIVE_DEFAULT)
    machines: list[GuestSandbox] = []
    try:
        for _ in range(num_machines):
            machines.append(await _start(backend))
        await asyncio.gather(*(machine.ping() for machine in machines))
        pss_mib = _pss_mib(machines[num_machines // 2])
    finally:
        await asyncio.gather(*(machine.close() for machine in machines))
    return {"live_max": len(machines), "pss_mib": pss_mib}


async def _requests(backend: Backend) -> dict[str, float]:
    machine = await _start(backend)
    try:
        pings = await times_ms(machine.ping, 200)
        trues = await times_ms(lambda: machine.exec(["true"], timeout_s=TIMEOUT_S), 100)
        pythons = await times_ms(lambda: machine.exec(PYTHON, timeout_s=TIMEOUT_S), 20)
    finally:
        await machine.close()
    return {
        "ping_us_p50": percentile(pings, 50) * 1000,
        "exec_ms_p50": percentile(trues, 50),
        "python_ms_p50": percentile(pythons, 50),
    }


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
