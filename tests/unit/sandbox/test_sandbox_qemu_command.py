"""QEMU's command line: what the confined process sees of the host."""

from pathlib import Path

import msgspec
import pytest

from penstock.envs.microvm.images.assets import QemuAssets, find_bubblewrap, load_qemu_assets
from penstock.envs.microvm.qemu.command import QemuCommand, find_qemu
from penstock.envs.sandbox import BackendUnavailable

BOOTED = {name: Path(f"/cache/{name}") for name in ("kernel", "initramfs", "image")}
BUILT = {name: Path(f"/cache/{name}") for name in ("program", "firmware")}
ASSETS = QemuAssets(
    kernel="k", kernel_digest="", kernel_version="", initramfs="i", initramfs_digest="", inputs=""
)


def command_line(files, devices=()):
    try:
        find_bubblewrap()
        find_qemu()
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    make = QemuCommand(files, mem_bytes=1 << 28, accelerator="tcg", devices=devices)
    return make(7, monitor=8, devices=9, memory=10, boots=False)


def seen(argv):
    """Return what bubblewrap shows inside, and the program and its own arguments."""
    end = argv.index("--")
    binds = ("--ro-bind", "--ro-bind-try", "--dev-bind")
    return [argv[i + 2] for i in range(end) if argv[i] in binds], argv[end + 1 :]


def test_a_qemu_of_our_own_sees_its_files_and_nothing_else_of_the_host():
    inside, program = seen(command_line(BOOTED | BUILT))
    names = ("kernel", "initramfs", "image", "program", "bios-microvm.bin")
    assert sorted(inside) == sorted(f"/vm/{name}" for name in names)
    assert program[:3] == ["/vm/program", "-L", "/vm"]


def test_debians_qemu_sees_the_hosts_libraries():
    inside, program = seen(command_line(BOOTED))
    assert "/usr" in inside
    assert program[0] == find_qemu()


@pytest.mark.parametrize("files", [BOOTED, BOOTED | BUILT])
def test_a_device_of_the_host_is_not_hidden_by_the_other_devices(files):
    argv = command_line(files, ("/dev/kvm",))
    assert "--dev" not in argv[argv.index("--dev-bind") :]


def test_a_set_without_a_program_is_whole_and_one_whose_program_is_gone_is_not(tmp_path):
    folder = tmp_path / QemuAssets.folder
    folder.mkdir()
    for name in ("k", "i"):
        (folder / name).touch()
    manifest = folder / "current.json"
    manifest.write_bytes(msgspec.json.encode(ASSETS))
    assert load_qemu_assets(tmp_path)[1].files() == {"kernel": "k", "initramfs": "i"}
    manifest.write_bytes(msgspec.json.encode(msgspec.structs.replace(ASSETS, program="p")))
    with pytest.raises(BackendUnavailable, match="p is missing"):
        load_qemu_assets(tmp_path)
