"""Machines: ready, first exec, memory, requests, agents' steps; beside bubblewrap and the host.

Every backend that runs guest code here is measured in the same run: `process` is bubblewrap
alone, `native` the same programs on the host. Ratios between them are worth more than times.
"""

import argparse
import asyncio
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, cast

from tests.lab.bench.sandbox_saving import bench_saving
from tests.lab.bench.sandbox_steps import bench_native, steps_per_s, times_ms

from penstock.envs.backends import open_backend
from penstock.envs.microvm.host_process import process_tree
from penstock.envs.microvm.machine import GuestSandbox
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.microvm.probe import probe
from penstock.envs.microvm.qemu.backend import QemuTcgBackend
from penstock.envs.sandbox import SandboxBackend
from penstock.messages.telemetry import percentile

TIMEOUT_S = 120.0
PYTHON = ("python3", "-I", "-S", "-B", "-c", "1")
NUM_BOOTS = {"qemu-tcg": 12}
NUM_BOOTS_DEFAULT = 200
"""So that the 99th percentile is not the slowest one."""
READ_MIB = 8
NUM_LIVE = {"qemu-tcg": 8, "qemu-kvm": 8, "process": 100}
NUM_LIVE_DEFAULT = 500
RESERVE_MIB = 4096
"""No more machines are started when the host has less left than this."""
AT_ONCE = 2
GONE_WITHIN_S = 10.0


async def run(_arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every backend that the probe finds.

    Returns:
        By backend: `ready_ms_*` (start to the first answer), `ready_cpu_ms_*` (the machine's part
        of that on a processor, the same on a busy host), `vms_per_s` (through the pool, with a
        first exec), `ping_us_p50`, `exec_ms_p50` (`true`), `python_ms_p50`,
        `guest_to_host_mb_per_s` (a file), `agent_steps_per_s` (eight agents search, edit, test and
        commit), what `bench_live` says, and of QEMU what `bench_saving` says.

    """
    found: dict[str, Any] = {}
    for result in await probe():
        if result.available:
            backend = open_backend(result.name, allow_process=True)
            found[result.name] = await _bench_backend(backend)
        else:
            sys.stderr.write(f"{result.name} was not measured: {result.reason}\n")
    found["native"] = await bench_native()
    return found


async def _bench_backend(backend: SandboxBackend) -> dict[str, float]:
    figures = await _boots(backend)
    figures |= await _rate(backend)
    figures |= await bench_live(backend)
    figures |= await _requests(backend)
    figures["agent_steps_per_s"] = await steps_per_s(backend)
    if isinstance(backend, QemuTcgBackend):
        figures |= await bench_saving(backend)
    return {name: round(value, 3) for name, value in figures.items()}


def _count(table: dict[str, int], backend: SandboxBackend, default: int) -> int:
    return table.get(backend.name, default)


async def _start(backend: SandboxBackend, cpu: int | None = None) -> GuestSandbox:
    return cast(GuestSandbox, await backend.start(cpu=cpu, timeout_s=TIMEOUT_S))


async def _boots(backend: SandboxBackend) -> dict[str, float]:
    cpus = sorted(os.sched_getaffinity(0))
    await (await _start(backend)).close()  # a template is made once, and is no boot
    ready_ms: list[float] = []
    cpu_ms: list[float] = []
    for n in range(_count(NUM_BOOTS, backend, NUM_BOOTS_DEFAULT)):
        machine = await _start(backend, cpus[n % len(cpus)])
        ready_ms.append(machine.info.boot_ms)
        cpu_ms.append(_cpu_ms(machine.process.pid))
        await machine.close()
    return {
        "ready_ms_p50": percentile(ready_ms, 50),
        "ready_ms_p99": percentile(ready_ms, 99),
        "ready_cpu_ms_p50": percentile(cpu_ms, 50),
        "ready_cpu_ms_p99": percentile(cpu_ms, 99),
    }


def _cpu_ms(pid: int) -> float:
    """Return the processor time that a machine took so far; waiting for a busy host is none."""
    tasks = [Path(f"/proc/{each}/task") for each in process_tree(pid)]
    stats = [stat.read_text() for task in tasks for stat in task.glob("*/schedstat")]
    return sum(int(stat.split()[0]) for stat in stats) / 1e6


async def _rate(backend: SandboxBackend) -> dict[str, float]:
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


async def _requests(backend: SandboxBackend) -> dict[str, float]:
    machine = await _start(backend)
    try:
        pings = await times_ms(machine.ping, 200)
        trues = await times_ms(lambda: machine.exec(["true"], timeout_s=TIMEOUT_S), 100)
        pythons = await times_ms(lambda: machine.exec(PYTHON, timeout_s=TIMEOUT_S), 20)
        megabytes_per_s = await _megabytes_per_s(machine)
    finally:
        await machine.close()
    return {
        "ping_us_p50": percentile(pings, 50) * 1000,
        "exec_ms_p50": percentile(trues, 50),
        "python_ms_p50": percentile(pythons, 50),
        "guest_to_host_mb_per_s": megabytes_per_s,
    }


async def _megabytes_per_s(machine: GuestSandbox) -> float:
    """Return the rate at which a file is read out of a machine, in 10^6 bytes per second."""
    script = f"head -c {READ_MIB << 20} /dev/urandom > /tmp/big"
    await machine.exec(["sh", "-c", script], timeout_s=TIMEOUT_S)
    rates: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        data = await machine.read_file("/tmp/big", READ_MIB << 20)
        rates.append(len(data) / 1e6 / (time.perf_counter() - began))
    return percentile(rates, 50)


async def bench_live(backend: SandboxBackend) -> dict[str, float]:
    """Hold machines at once, get an answer from each, end them all.

    Returns:
        `live_max` (all of them answered; fewer than requested where the host's memory runs short),
        `pss_mib` and `pss_mib_max` (of one machine's processes, shared pages in proportion),
        `live_s` (until the last one answered), `left_behind` (processes after all were closed).

    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # each machine takes two descriptors
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    machines: list[GuestSandbox] = []
    trees: list[list[tuple[int, str]]] = []
    began = asyncio.get_running_loop().time()
    try:
        await _fill(backend, machines, NUM_LIVE.get(backend.name, NUM_LIVE_DEFAULT))
        await asyncio.gather(*(machine.ping() for machine in machines))
        live_s = asyncio.get_running_loop().time() - began
        pss_mib = [_pss_mib(machine.process.pid) for machine in machines]
        trees = [_identified(machine.process.pid) for machine in machines]
    finally:
        await asyncio.gather(*(machine.close() for machine in machines))
    return {
        "live_max": len(machines),
        "live_s": live_s,
        "pss_mib": sum(pss_mib) / len(pss_mib),
        "pss_mib_max": max(pss_mib),
        "left_behind": await _left_behind([one for tree in trees for one in tree]),
    }


async def _fill(backend: SandboxBackend, machines: list[GuestSandbox], num_machines: int) -> None:
    cpus = sorted(os.sched_getaffinity(0))

    async def one_after_the_other(first: int) -> None:
        for number in range(first, num_machines, AT_ONCE):
            if machines and _available_mib() < RESERVE_MIB:
                return
            cpu = cpus[number % len(cpus)]
            machines.append(cast(GuestSandbox, await backend.start(cpu=cpu, timeout_s=TIMEOUT_S)))

    async with asyncio.TaskGroup() as group:
        for first in range(AT_ONCE):
            group.create_task(one_after_the_other(first))


def _available_mib() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 1024


def _pss_mib(pid: int) -> float:
    """Return the memory of a machine's processes, shared pages in proportion."""
    kib = 0
    for each in process_tree(pid):
        rollup = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        kib += sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    return kib / 1024


def _identified(pid: int) -> list[tuple[int, str]]:
    return [(each, _start_time(each)) for each in process_tree(pid)]


def _start_time(pid: int) -> str:
    """Return when a process began, in ticks; ids are used again. Empty if it has ended.

    One that has ended and waits for its parent to take note of it holds nothing more.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else fields[18]


async def _left_behind(processes: list[tuple[int, str]]) -> int:
    """Return how many processes have not ended in time."""
    give_up_at = asyncio.get_running_loop().time() + GONE_WITHIN_S
    while left := [pid for pid, born in processes if _start_time(pid) == born]:
        if asyncio.get_running_loop().time() > give_up_at:
            break
        await asyncio.sleep(0.1)
    return len(left)
