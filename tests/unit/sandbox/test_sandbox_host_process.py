"""A host without room for one more machine fails that boot, in the sandbox's own terms."""

import os
import resource
from pathlib import Path

import pytest

from penstock.envs.microvm.confinement import confinement
from penstock.envs.microvm.confinement.confinement import Confinement
from penstock.envs.microvm.host_process import HostProcess
from penstock.envs.microvm.machine import start_machine
from penstock.envs.sandbox import SandboxDied


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def start(launcher: str = "/no-such-launcher", **files: Path) -> None:
    confined = Confinement(Path(launcher), files, [], calls=b"", memory_mib=64)
    await start_machine(
        confined, lambda fd, paths: ["true"], lambda boot_ms: None, cpu=None, timeout_s=5.0
    )


async def test_a_program_that_is_gone_fails_the_boot_and_leaves_nothing_open():
    before = num_descriptors()
    with pytest.raises(SandboxDied, match=r"cannot start a machine: .*no-such-launcher"):
        await start()
    assert num_descriptors() == before


async def test_a_file_that_is_gone_fails_the_boot_and_leaves_nothing_open():
    before = num_descriptors()
    with pytest.raises(SandboxDied, match=r"cannot start a machine: .*no-such-kernel"):
        await start(kernel=Path("/no-such-kernel"))
    assert num_descriptors() == before


async def test_a_host_without_descriptors_fails_the_boot(monkeypatch):
    def socketpair():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(confinement.socket, "socketpair", socketpair)
    with pytest.raises(SandboxDied, match="Too many open files"):
        await start()


async def test_a_process_ends_where_no_descriptor_is_left():
    process = HostProcess(["sleep", "60"], None, ())
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0) for _ in range(64)]  # No number below the last one is free.
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1, before[1]))
    try:
        await process.kill()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in taken:
            os.close(fd)
    assert not Path(f"/proc/{process.pid}").exists()
