"""Machines that are copied and saved while they run; needs QEMU (`make vm-qemu`)."""

import asyncio

import pytest

from penstock.envs.backends import open_backend
from penstock.envs.sandbox import (
    BackendUnavailable,
    Capability,
    SandboxFileError,
    SandboxRequestError,
    require,
)

from .check_sandbox import sh

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(600)]
START_S = 120.0
"""An emulated processor on a busy host is slow."""


@pytest.fixture(scope="module")
def backend():
    try:
        return open_backend("qemu-tcg")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))


async def test_copies_differ_in_what_must_differ(backend):
    asked = "cat /etc/machine-id; head -c 16 /dev/urandom | od -An -tx1; date +%s"
    machines = [await backend.start(timeout_s=START_S) for _ in range(2)]
    one, two = [(await sh(machine, asked, timeout_s=START_S)).split("\n") for machine in machines]
    assert one[0] != two[0]
    assert one[1] != two[1]
    host = await asyncio.create_subprocess_exec("date", "+%s", stdout=asyncio.subprocess.PIPE)
    now = int((await host.communicate())[0])
    assert abs(now - int(two[2])) < START_S
    await sh(machines[0], "echo mine > /work/file", timeout_s=START_S)
    assert await machines[1].list_files("/work") == []
    for machine in machines:
        await machine.close()


async def test_several_go_on_from_one_state_and_nothing_runs_twice(backend, tmp_path):
    require(backend, [Capability.CHECKPOINT, Capability.FORK])
    machine = await backend.start(timeout_s=START_S)
    await sh(machine, "echo before > story", timeout_s=START_S)
    argv = ["sh", "-c", "sleep 3; echo ran >> runs; wc -l < runs"]
    running = asyncio.create_task(machine.exec(argv, timeout_s=START_S, op_key="k"))
    await sh(machine, "true", timeout_s=START_S)
    await machine.checkpoint(tmp_path / "saved")
    branches = [await backend.restore(tmp_path / "saved", timeout_s=START_S) for _ in range(2)]
    for number, branch in enumerate(branches):
        await sh(branch, f"echo {number} >> story", timeout_s=START_S)
    told = [await sh(m, "cat story", timeout_s=START_S) for m in (machine, *branches)]
    assert told == ["before\n", "before\n0\n", "before\n1\n"]
    for each in (machine, *branches):  # a repeat waits for the command that was in flight
        again = await each.exec(argv, timeout_s=START_S, op_key="k")
        assert again.stdout == b"1\n"
    assert (await running).stdout == b"1\n"
    for each in (machine, *branches):
        await each.close()


async def test_requests_made_during_a_save_are_served_after_it(backend, tmp_path):
    machine = await backend.start(timeout_s=START_S)
    saving = asyncio.create_task(machine.checkpoint(tmp_path / "saved"))
    await asyncio.sleep(0.01)
    assert await sh(machine, "echo served", timeout_s=START_S) == "served\n"
    await saving
    with pytest.raises(SandboxFileError, match="exists already"):
        await machine.checkpoint(tmp_path / "saved")
    await machine.close()


async def test_a_request_for_the_machine_before_the_copy_is_refused(backend, tmp_path):
    machine = await backend.start(timeout_s=START_S)
    await machine.checkpoint(tmp_path / "saved")
    copy = await backend.restore(tmp_path / "saved", timeout_s=START_S)
    copy._connection.epoch -= 1
    with pytest.raises(SandboxRequestError, match="stale_epoch"):
        await copy.exec(["true"], timeout_s=START_S)
    await machine.close()
    await copy.close()


async def test_a_damaged_checkpoint_is_refused(backend, tmp_path):
    machine = await backend.start(timeout_s=START_S)
    folder = tmp_path / "saved"
    await machine.checkpoint(folder)
    await machine.close()
    with (folder / "state").open("ab") as state:
        state.write(b"x")
    with pytest.raises(SandboxFileError, match="bytes of state"):
        await backend.restore(folder)
    (folder / "checkpoint.json").unlink()
    with pytest.raises(SandboxFileError, match=r"checkpoint\.json"):
        await backend.restore(folder)


async def test_a_copys_clock_moves_in_fine_steps(backend):
    machine = await backend.start(timeout_s=START_S)
    look = "import time; print(len({time.monotonic() for _ in range(1000)}))"
    seen = await machine.exec(["python3", "-c", look], timeout_s=START_S)
    assert int(seen.stdout) == 1000
    await machine.close()
