"""A host without room for one more machine fails that boot, in the sandbox's own terms."""

import os
import resource
from pathlib import Path

import pytest

from penstock.envs.microvm import host_process
from penstock.envs.microvm.machine import start_machine
from penstock.envs.sandbox import SandboxDied


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def start(command) -> None:
    await start_machine(command, lambda boot_ms: None, cpu=None, timeout_s=5.0)


async def test_a_program_that_is_gone_fails_the_boot_and_leaves_nothing_open():
    before = num_descriptors()
    with pytest.raises(SandboxDied, match=r"no machine could be started: .*no-such-program"):
        await start(lambda fd: ["/no-such-program", str(fd)])
    assert num_descriptors() == before


async def test_a_host_without_descriptors_fails_the_boot(monkeypatch):
    def socketpair():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(host_process.socket, "socketpair", socketpair)
    with pytest.raises(SandboxDied, match="Too many open files"):
        await start(lambda fd: ["true"])


async def test_a_process_ends_where_no_descriptor_is_left():
    process, ours = host_process.start_process(lambda fd: ["sleep", "60"], None)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0) for _ in range(64)]  # No number below the last one is free.
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1, before[1]))
    try:
        await process.kill()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in taken:
            os.close(fd)
        ours.close()
    assert not Path(f"/proc/{process.pid}").exists()
