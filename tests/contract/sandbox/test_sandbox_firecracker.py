"""The Firecracker adapter against a server that checks its requests; no real binary is here."""

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from penstock.envs.microvm.firecracker import backend as firecracker
from penstock.envs.microvm.images.assets import QemuAssets, VmAssets
from penstock.envs.sandbox import (
    BackendUnavailable,
    Capability,
    IsolationClass,
    SandboxFileError,
    require,
)

SERVER = Path(__file__).with_name("firecracker_contract.py")


@pytest.fixture
def backend(tmp_path, monkeypatch):
    """Over files that stand for kernel, image and agent."""
    for name in ("kernel", "initramfs", "image", "agent"):
        (tmp_path / name).write_bytes(name.encode())
    base = VmAssets(
        kernel="kernel", kernel_digest="k", kernel_version="7", image="image", image_digest="i",
        agent="agent", agent_digest="a",
    )  # fmt: skip
    kernel = QemuAssets(
        kernel="kernel", kernel_digest="k", kernel_version="6", initramfs="initramfs",
        initramfs_digest="r", inputs="",
    )  # fmt: skip
    monkeypatch.setattr(firecracker, "load_assets", lambda cache: (tmp_path, base))
    monkeypatch.setattr(firecracker, "load_qemu_assets", lambda cache: (tmp_path, kernel))
    monkeypatch.setattr(firecracker.os, "chown", lambda path, uid, gid: None)
    jailer = (sys.executable, str(SERVER))
    with tempfile.TemporaryDirectory(prefix="jails") as short:  # as a socket's path must be
        monkeypatch.setattr(firecracker.os, "link", shutil.copy)
        yield firecracker.FirecrackerBackend(jails=Path(short), jailer=jailer)


def jails(backend) -> list[Path]:
    return list((backend._jails / "firecracker").iterdir())


async def test_machines_are_copies_of_a_saved_one_and_leave_nothing(backend):
    require(backend, [Capability.CHECKPOINT, Capability.FORK])
    one, two = [await backend.start(timeout_s=20.0) for _ in range(2)]
    assert one.info.isolation_class == IsolationClass.HARDWARE_VM
    said = await asyncio.gather(*(m.exec(["echo", "x"], timeout_s=5.0) for m in (one, two)))
    assert [result.stdout for result in said] == [b"echo x", b"echo x"]
    assert len(jails(backend)) == 2
    await one.close()
    await two.close()
    assert jails(backend) == []


async def test_a_running_machine_is_saved_and_goes_on(backend, tmp_path):
    machine = await backend.start(timeout_s=20.0)
    await machine.checkpoint(tmp_path / "saved")
    with pytest.raises(SandboxFileError, match="exists already"):
        await machine.checkpoint(tmp_path / "saved")
    copy = await backend.restore(tmp_path / "saved", timeout_s=20.0)
    for each in (machine, copy):
        assert (await each.exec(["true"], timeout_s=5.0)).stdout == b"true"
        await each.close()


async def test_what_the_api_refuses_is_said_and_leaves_nothing(backend):
    backend._files.pop("initramfs")
    with pytest.raises(RuntimeError, match=r"/boot-source: 400: .*initrd_path"):
        await backend.start(timeout_s=20.0)
    assert jails(backend) == []


def test_without_the_program_it_says_so(backend, monkeypatch):
    monkeypatch.setattr(firecracker.shutil, "which", lambda name: None)
    with pytest.raises(BackendUnavailable, match="jailer is missing"):
        firecracker.FirecrackerBackend()
