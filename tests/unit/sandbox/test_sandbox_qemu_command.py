"""QEMU's command line: what the confined process sees of the host."""

from pathlib import Path

import msgspec
import pytest

from penstock.envs.microvm.images.assets import QemuAssets, find_bubblewrap, load_qemu_assets
from penstock.envs.microvm.qemu.command import QemuCommand, find_qemu
from penstock.envs.sandbox import BackendUnavailable
from penstock.messages.task import MachineNeeds

BOOTED = {name: Path(f"/cache/{name}") for name in ("kernel", "initramfs", "image")}
BUILT = {name: Path(f"/cache/{name}") for name in ("program", "firmware")}
ASSETS = QemuAssets(
    kernel="k", kernel_digest="", kernel_version="", initramfs="i", initramfs_digest="", inputs=""
)


def command(files, devices=()):
    try:
        find_bubblewrap()
        find_qemu()
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    needs = MachineNeeds(memory_mib=256, processors=2)
    launcher = Path("/no-such-launcher")
    return QemuCommand(launcher, files, needs=needs, accelerator="tcg", devices=devices)


def program(make):
    paths = {name: f"/proc/self/fd/{n}" for n, name in enumerate(make.confinement.files)}
    return make(7, paths, monitor=8, devices=9, memory=10, boots=False), paths


def seen(options):
    """Return what bubblewrap shows of the host inside."""
    binds = ("--ro-bind", "--ro-bind-try", "--dev-bind")
    return [options[i + 2] for i, option in enumerate(options) if option in binds]


def test_a_qemu_of_our_own_sees_its_files_and_nothing_else_of_the_host():
    make = command(BOOTED | BUILT)
    argv, paths = program(make)
    assert seen(make.confinement.options) == []
    assert argv[:3] == [paths["program"], "-bios", paths["firmware"]]


def test_debians_qemu_sees_the_hosts_libraries():
    make = command(BOOTED)
    assert "/usr" in seen(make.confinement.options)
    assert program(make)[0][0] == find_qemu()


def test_its_size_is_what_was_asked_for():
    argv, _ = program(command(BOOTED | BUILT))
    assert argv[argv.index("-m") + 1] == "256M"
    assert argv[argv.index("-smp") + 1] == "2"


@pytest.mark.parametrize("files", [BOOTED, BOOTED | BUILT])
def test_a_device_of_the_host_is_not_hidden_by_the_other_devices(files):
    options = command(files, ("/dev/null",)).confinement.options
    assert "--dev" not in options[options.index("--dev-bind") :]


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
