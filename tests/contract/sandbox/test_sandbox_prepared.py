"""Copies made beforehand; needs QEMU (`make vm-qemu`)."""

import pytest

from penstock.envs.backends import open_backend
from penstock.envs.microvm.qemu.backend import PREPARED_MAX
from penstock.envs.sandbox import BackendUnavailable

from .check_sandbox import sh

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(600)]
START_S = 120.0


@pytest.fixture
async def backend():
    try:
        opened = open_backend("qemu-tcg")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    yield opened
    await opened.close()


async def test_prepared_copies_are_machines_of_their_own(backend):
    await backend.prepare(2)
    machines = [await backend.start(timeout_s=START_S) for _ in range(3)]
    asked = "cat /etc/machine-id; head -c 16 /dev/urandom | od -An -tx1"
    told = [(await sh(machine, asked, timeout_s=START_S)).split("\n") for machine in machines]
    assert len({ids[0] for ids in told}) == 3
    assert len({ids[1] for ids in told}) == 3
    prepared = [machine.info.boot_ms for machine in machines[:2]]
    assert max(prepared) < machines[2].info.boot_ms
    for machine in machines:
        await machine.close()


async def test_a_prepared_branch_goes_on_from_its_checkpoint_alone(backend, tmp_path):
    machine = await backend.start(timeout_s=START_S)
    await sh(machine, "echo saved > story", timeout_s=START_S)
    await machine.checkpoint(tmp_path / "saved")
    await backend.prepare(1, tmp_path / "saved")
    fresh = await backend.start(timeout_s=START_S)
    assert await fresh.list_files("/work") == []
    branch = await backend.restore(tmp_path / "saved", timeout_s=START_S)
    assert await sh(branch, "cat story", timeout_s=START_S) == "saved\n"
    for each in (machine, fresh, branch):
        await each.close()


async def test_a_checkpoint_is_restored_elsewhere_and_its_branch_saved(tmp_path, backend):
    machine = await backend.start(timeout_s=START_S)
    await sh(machine, "echo one > story", timeout_s=START_S)
    await machine.checkpoint(tmp_path / "one")
    await machine.close()
    elsewhere = open_backend("qemu-tcg")
    branch = await elsewhere.restore(tmp_path / "one", timeout_s=START_S)
    await sh(branch, "echo two >> story", timeout_s=START_S)
    await branch.checkpoint(tmp_path / "two")
    await branch.close()
    last = await backend.restore(tmp_path / "two", timeout_s=START_S)
    assert await sh(last, "cat story", timeout_s=START_S) == "one\ntwo\n"
    await last.close()


async def test_no_more_copies_stand_by_than_the_bound(backend):
    await backend.prepare(1)
    first = backend._prepared[0][1]
    await backend.prepare(PREPARED_MAX)
    assert len(backend._prepared) == PREPARED_MAX
    assert not first.alive
    await backend.close()
    assert not backend._prepared
