"""Many machines at once: how many, what each takes of the host's memory, and what they leave."""

import asyncio
import os
import resource
from pathlib import Path
from typing import cast

from penstock.envs.microvm.host_process import process_tree
from penstock.envs.microvm.machine import GuestSandbox
from penstock.envs.sandbox import SandboxBackend

TIMEOUT_S = 120.0
NUM_LIVE = {"qemu-tcg": 8, "qemu-kvm": 8, "process": 100}
NUM_LIVE_DEFAULT = 500
RESERVE_MIB = 4096
"""No more machines are started when the host has less left than this."""
AT_ONCE = 2
GONE_WITHIN_S = 10.0


async def bench_live(backend: SandboxBackend) -> dict[str, float]:
    """Hold machines at once, ask each for an answer, end them all.

    Returns:
        `live_max` (all of them answered; fewer than wanted where the host's memory runs short),
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


async def _fill(backend: SandboxBackend, machines: list[GuestSandbox], wanted: int) -> None:
    cpus = sorted(os.sched_getaffinity(0))

    async def one_after_the_other(first: int) -> None:
        for number in range(first, wanted, AT_ONCE):
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
