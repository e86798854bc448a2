"""Every backend under the one conformance suite, and what only a real kernel contains."""

import asyncio
import functools

import pytest

from penstock.envs.backends import backends, open_backend
from penstock.envs.microvm.probe import probe_backend
from penstock.envs.sandbox import BackendUnavailable, Capability, CapabilityMissing, require

from .check_sandbox import CHECKS, sh

pytestmark = pytest.mark.vm


@functools.cache
def opened(name):
    """One backend of a name for all tests: QEMU's keeps the machine that others are copies of."""
    try:
        return open_backend(name, allow_process=True)
    except BackendUnavailable as missing:
        pytest.skip(str(missing))


SLOW = {"qemu-tcg", "qemu-kvm"}
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow, pytest.mark.timeout(600)]) if name in SLOW else name
    for name in backends
]


@functools.cache
def probed(name):
    """What the probe found of a backend here; asked once."""
    return asyncio.run(probe_backend(name))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", NAMES)
async def test_backend(name, check):
    opened(name)
    if name in SLOW and not (found := await asyncio.to_thread(probed, name)).available:
        assert "the guest" not in found.reason, "a guest that is refused is no reason to skip"
        pytest.skip(f"{name} runs no guest code here: {found.reason}")
    machine = await opened(name).start(timeout_s=60.0)
    try:
        await check(machine)
    finally:
        await machine.close()


async def test_a_memory_hog_and_a_fork_bomb_leave_the_machine_usable():
    machine = await opened("uml").start(timeout_s=60.0)
    try:
        hog = "x = bytearray(1 << 20)\nwhile True: x += x"
        result = await machine.exec(["python3", "-I", "-S", "-c", hog], timeout_s=20.0)
        assert result.exit_code != 0
        bomb = "b() { b | b & }; b; sleep 0.2"
        await machine.exec(["sh", "-c", bomb], timeout_s=1.0)
        assert await sh(machine, "echo fine") == "fine\n"
    finally:
        await machine.close()


async def test_the_guest_kernel_is_not_the_hosts():
    machine = await opened("uml").start(timeout_s=60.0)
    try:
        said = await sh(machine, "uname -r; cat /proc/1/comm")
        version, init = said.split()
        assert version == opened("uml").assets.kernel_version
        assert init == "penstock-agent"
    finally:
        await machine.close()


async def test_absent_capabilities_raise():
    backend = opened("uml")
    require(backend, [Capability.OWN_KERNEL])
    with pytest.raises(CapabilityMissing, match=r"'uml' has no fork"):
        require(backend, [Capability.FORK])
    with pytest.raises(CapabilityMissing):
        require(opened("process"), [Capability.OWN_KERNEL])


def test_an_unknown_backend_lists_the_choices():
    with pytest.raises(BackendUnavailable, match=r"choose one of \[.*'process', .*'uml'\]"):
        open_backend("qemu")


def test_process_needs_an_explicit_flag():
    with pytest.raises(BackendUnavailable, match="allow_process"):
        open_backend("process")


def test_an_empty_cache_says_how_to_get_the_files(tmp_path):
    with pytest.raises(BackendUnavailable, match="make setup"):
        open_backend("uml", cache=tmp_path)
    (tmp_path / "current.json").write_text("{")
    with pytest.raises(BackendUnavailable, match="broken"):
        open_backend("uml", cache=tmp_path)


async def test_a_machine_whose_line_is_cut_ends_by_itself():
    """Its owner was killed before the kernel had been told to take the machine along."""
    machine = await opened("uml").start(timeout_s=60.0)
    try:
        machine._connection.abort()
        async with asyncio.timeout(20.0):
            await machine.process._wait_for_exit()
    finally:
        await machine.process.kill()
