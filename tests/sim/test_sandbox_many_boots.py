"""Thousands of boots while machines and their owners are killed at random: nothing is left over.

`PENSTOCK_BOOTS` says how many; 10,000 take some ten minutes on two free cores.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.envs.microvm.assets import vm_cache_dir
from penstock.envs.sandbox import BackendUnavailable, open_backend

from .test_sandbox_faults import children_of, left_of

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(3600)]
NUM_BOOTS = int(os.environ.get("PENSTOCK_BOOTS", "300"))
BOOTS_BEFORE_KILL_MAX = min(80, 1 + NUM_BOOTS // 4)

OWNER = """
import asyncio, os, random, signal, sys
from penstock.envs.microvm.pool import Pool
from penstock.envs.sandbox import SandboxError, open_backend
from penstock.messages.errors import DeadlineError

rng = random.Random(int(sys.argv[1]))
ONCE = ["sh", "-c", "echo run >> runs; sleep 0.01; wc -l < runs"]

async def episode(pool):
    lease = await pool.acquire(60.0)
    machine = lease.sandbox
    asked = [machine.exec(ONCE, timeout_s=30.0, op_key="once") for _ in range(3)]
    running = asyncio.gather(*asked, return_exceptions=True)
    is_killed = rng.random() < 0.2
    if is_killed:
        await asyncio.sleep(rng.random() * 0.05)
        os.kill(machine.process.pid, signal.SIGKILL)
    for result in await running:
        if isinstance(result, SandboxError) and is_killed:
            continue
        assert result.stdout == b"1\\n", result
    await pool.release(lease.lease_id)
    print("killed" if is_killed else "done", flush=True)

async def worker(pool):
    while True:
        await episode(pool)

async def main():
    async with Pool(open_backend("uml"), size=2, live_max=8) as pool, asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(worker(pool))

asyncio.run(main())
"""


def traces() -> set[str]:
    """What machines might leave in the file system and in shared memory."""
    folders = (vm_cache_dir(), Path("/dev/shm"), Path("/tmp"))
    names = {str(path) for folder in folders for path in folder.glob("*")}
    return {name for name in names if "vm_file" in name or "bwrap" in name or "/vm/" in name}


def owner_until_killed(seed: int, num_boots: int) -> tuple[int, int, list[int]]:
    """Run an owner for some boots, kill it; return boots, kills and the processes that it had."""
    command = [sys.executable, "-c", OWNER, str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as owner:
        seen = []
        for line in owner.stdout:
            seen.append(line.strip())
            if len(seen) >= num_boots:
                break
        assert len(seen) >= num_boots, owner.stderr.read().decode()
        pids = children_of(owner.pid)
        owner.send_signal(signal.SIGKILL)
    return len(seen), seen.count(b"killed"), pids


def test_nothing_is_left_of_machines_and_owners_that_were_killed():
    try:
        open_backend("uml")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    rng = random.Random(5)
    before = traces()
    booted = killed = owners = 0
    while booted < NUM_BOOTS:
        seed, wanted = rng.randrange(1 << 30), rng.randint(1, BOOTS_BEFORE_KILL_MAX)
        boots, kills, pids = owner_until_killed(seed, wanted)
        assert pids, "an owner without machines tests nothing"
        assert left_of(pids) == []
        booted, killed, owners = booted + boots, killed + kills, owners + 1
    assert killed > 0
    assert owners > 1
    deadline = time.monotonic() + 10
    while traces() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert traces() - before == set()
