"""Machines that are killed, hang, or lose their owner; what their users and the host see."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from penstock.envs.backends import open_backend
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.microvm.protocol import GuestRequest
from penstock.envs.sandbox import BackendUnavailable, SandboxDied, SandboxTimeout

from .boots.processes import children_of, left_of, num_descriptors

pytestmark = pytest.mark.vm

OWNER = """
import asyncio
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.backends import open_backend

async def main():
    async with Pool(open_backend("uml"), size=2, live_max=4) as pool:
        lease = await pool.acquire(60.0)
        run = asyncio.create_task(lease.sandbox.exec(["sleep", "1000"], timeout_s=1000.0))
        await lease.sandbox.exec(["true"], timeout_s=30.0)
        while pool.counters().idle < 2:
            await asyncio.sleep(0.01)
        print("ready", flush=True)
        await run

asyncio.run(main())
"""


@pytest.fixture
def backend():
    try:
        return open_backend("uml")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))


async def test_a_machine_killed_during_a_command_is_a_death(backend):
    machine = await backend.start(timeout_s=60.0)
    running = asyncio.create_task(machine.exec(["sleep", "1000"], timeout_s=1000.0))
    await machine.exec(["true"], timeout_s=20.0)
    inside = children_of(machine.process.pid)
    os.kill(inside[0], signal.SIGKILL)
    with pytest.raises(SandboxDied):
        await running
    assert not machine.alive
    await machine.close()
    assert left_of(inside) == []


async def test_a_guest_that_powers_off_is_a_death(backend):
    machine = await backend.start(timeout_s=60.0)
    with pytest.raises(SandboxDied):
        await machine._connection.call(GuestRequest(op="shutdown"), timeout_s=5.0)
    await machine.close()


async def test_a_guest_whose_line_is_cut_ends_itself(backend):
    # The second guard against orphans, for an owner that dies before bubblewrap watches it.
    machine = await backend.start(timeout_s=60.0)
    inside = children_of(machine.process.pid)
    machine._connection.abort()
    assert await asyncio.to_thread(left_of, inside) == []
    await machine.close()


async def test_a_machine_that_hangs_is_a_timeout(backend):
    machine = await backend.start(timeout_s=60.0)
    machine.hang_grace_s = 0.1
    stopped = children_of(machine.process.pid)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(SandboxTimeout, match="'exec'"):
        await machine.exec(["true"], timeout_s=0.1)
    await machine.close()
    assert left_of(stopped) == []


async def test_a_boot_that_fails_has_the_last_words(backend):
    backend._program = lambda fd, files: ["/no-such-kernel"]
    with pytest.raises(SandboxDied, match="no-such-kernel"):
        await backend.start(timeout_s=60.0)


async def test_the_pool_replaces_what_dies(backend):
    async with Pool(backend, size=1, live_max=3) as pool:
        lease = await pool.acquire(60.0)
        os.kill(lease.sandbox.process.pid, signal.SIGKILL)
        with pytest.raises(SandboxDied):
            await lease.sandbox.exec(["sleep", "1000"], timeout_s=1000.0)
        await pool.release(lease.lease_id)
        again = await pool.acquire(60.0)
        assert (await again.sandbox.exec(["true"], timeout_s=20.0)).exit_code == 0
        assert pool.counters().deaths == 1


@pytest.mark.usefixtures("backend")
def test_kill_9_of_the_owner_leaves_no_orphan():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)
    with owner, owner.stdout:
        assert owner.stdout.readline() == b"ready\n"
        machines = children_of(owner.pid)
        assert len(machines) >= 6  # bubblewrap and kernel of three machines
        owner.kill()
        owner.wait()
    assert left_of(machines) == []


async def test_no_descriptor_stays_open(backend):
    machine = await backend.start(timeout_s=60.0)
    before = num_descriptors(os.getpid())
    for _ in range(3):
        other = await backend.start(timeout_s=60.0)
        await other.exec(["true"], timeout_s=20.0)
        await other.close()
    assert num_descriptors(os.getpid()) == before
    await machine.close()
