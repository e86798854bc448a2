"""Builds QEMU and the files that it boots: Debian's cloud kernel and an initramfs with its drivers.

QEMU is built from Debian's source package, statically and with only the devices of these machines.
Debian's own QEMU takes 18 ms of each start to find and link fifty libraries, this one 2 ms, and the
confined process needs no other program or library of the host. If the build fails, Debian's QEMU is
used.
"""

import os
import re
import struct
import tempfile
from pathlib import Path

import msgspec

from penstock.envs.microvm.images.assets import QemuAssets, digest_bytes
from penstock.envs.microvm.recipe.apt import apt_options
from penstock.envs.microvm.recipe.image import initramfs_inputs, pack_initramfs
from penstock.envs.microvm.recipe.steps import (
    BuildError,
    Say,
    Steps,
    build_lock,
    current_set,
    install_by_digest,
    kept_fields,
    publish,
    require_programs,
    run_for_output,
)

SOURCE = Path(__file__).resolve().parents[1] / "qemu_source"
"""Folder with the list of devices and a patch."""
SUITE = "bookworm"
FIRMWARE = Path("/usr/share/qemu/bios-microvm.bin")
"""Firmware from Debian's package `qemu-system-data`."""
PROGRAMS = ("apt-get", "dpkg-source", "patch", "meson", "ninja", "gcc", "g++", "pkg-config")
OPTIONS = (
    *("--static", "--disable-pie", "--without-default-features", "--without-default-devices"),
    *("--target-list=x86_64-softmmu", "--with-devices-x86_64=penstock", "--enable-system"),
    *("--enable-tcg", "--enable-kvm", "--enable-seccomp", "--enable-fdt=system"),
    *("--enable-coroutine-pool", "--disable-qom-cast-debug", "--disable-user", "--disable-tools"),
)


def program_inputs() -> list[bytes]:
    """Return the inputs of QEMU, except for the version of the source package."""
    own = (Path(__file__), *sorted(SOURCE.iterdir()))
    return [*(path.read_bytes() for path in own), run_for_output(["gcc", "--version"]).encode()]


def _fetch(steps: Steps) -> Path:
    """Return the unpacked source, with Debian's patches applied."""
    folder = steps.scratch / "apt"
    apt_get = ["apt-get", *apt_options(folder, "deb-src", SUITE)]
    steps.run("QEMU: source package lists", [*apt_get, "update"], timeout_s=120)
    get = [*apt_get, "source", "qemu"]
    steps.run("QEMU: downloading the source (24 MB)", get, timeout_s=600, cwd=folder)
    return next(path for path in folder.glob("qemu-*") if path.is_dir())


def build_program(steps: Steps) -> tuple[Path, Path]:
    """Build QEMU in the scratch folder, which needs 1 GB.

    Returns:
        The paths of the program and of its firmware.

    Raises:
        BuildError: A program or the firmware is missing, or a step failed.

    """
    require_programs(*PROGRAMS)
    if not FIRMWARE.is_file():
        raise BuildError(f"{FIRMWARE} is missing: apt-get install qemu-system-data")
    source = _fetch(steps)
    for path in sorted(SOURCE.glob("*.patch")):
        fix = ["patch", "-p1", "--force", "--input", str(path)]
        steps.run(f"QEMU: applying {path.name}", fix, timeout_s=60, cwd=source)
    devices = source / "configs" / "devices" / "x86_64-softmmu" / "penstock.mak"
    devices.write_bytes((SOURCE / "devices.mak").read_bytes())
    out = source / "out"
    out.mkdir()
    steps.run("QEMU: configuring", ["../configure", *OPTIONS], timeout_s=300, cwd=out)
    compile_command = ["ninja", f"-j{os.cpu_count() or 1}", "qemu-system-x86_64"]
    steps.run("QEMU: compiling (3-6 minutes)", compile_command, timeout_s=1800, cwd=out)
    program, firmware = steps.scratch / "program", steps.scratch / "firmware"
    strip = ["strip", "-o", str(program), "qemu-system-x86_64"]
    steps.run("QEMU: stripping the program", strip, timeout_s=60, cwd=out)
    firmware.write_bytes(FIRMWARE.read_bytes())
    return program, firmware


PACKAGE = "linux-image-cloud-amd64"
DRIVERS = (
    *("virtio_ring", "virtio", "virtio_mmio", "virtio_blk", "virtio_console"),
    *("vsock", "vmw_vsock_virtio_transport_common", "vmw_vsock_virtio_transport"),
    *("libcrc32c", "erofs", "overlay"),
)
"""Kernel modules in loading order: each may depend on those before it."""
LZ4_LEGACY = b"\x02\x21\x4c\x18"
"""Magic number of lz4's legacy frame."""


def build_qemu_assets(cache: Path, say: Say) -> QemuAssets:
    """Return the current set of QEMU's files, building only what is stale.

    Raises:
        BuildError: A program is missing, or a step failed; the old set stays in place.

    """
    require_programs("apt-get", "apt-cache", "dpkg-deb", "lz4", "gcc", "strip")
    folder = cache / QemuAssets.folder
    with build_lock(folder, say), tempfile.TemporaryDirectory(dir=folder) as scratch:
        old = current_set(QemuAssets, cache)
        steps = Steps(Path(scratch), say)
        parts = _boot_parts(steps, folder, old) | _program_parts(steps, folder, old)
        assets = msgspec.convert(parts, QemuAssets)
        if assets == old:
            say(f"QEMU: kernel {assets.kernel_version} is up to date")
            return assets
        publish(folder, assets, old)
        return assets


def _boot_parts(steps: Steps, folder: Path, old: QemuAssets | None) -> dict[str, str]:
    package = _package_name()
    inputs = digest_bytes(package.encode(), Path(__file__).read_bytes(), *initramfs_inputs())
    if old is not None and old.inputs == inputs:
        return kept_fields(old, ("kernel", "initramfs", "inputs"))
    steps.run(f"QEMU: downloading {package}", ["apt-get", "download", package], timeout_s=600)
    archive = next(steps.scratch.glob("linux-image-*.deb"))
    steps.run("QEMU: unpacking it", ["dpkg-deb", "-x", str(archive), "."], timeout_s=120)
    parts = install_by_digest(folder, "kernel", _unpack_kernel(steps), 0o644)
    initramfs = pack_initramfs(steps, "QEMU", steps.scratch / "lib" / "modules", DRIVERS)
    parts |= install_by_digest(folder, "initramfs", initramfs, 0o644)
    version = package.removeprefix("linux-image-")
    return {**parts, "kernel_version": version, "inputs": inputs}


def _program_parts(steps: Steps, folder: Path, old: QemuAssets | None) -> dict[str, str]:
    inputs = digest_bytes(*program_inputs())
    if old is not None and old.program_inputs == inputs:
        return kept_fields(old, ("program", "firmware"))
    try:
        program, firmware = build_program(steps)
    except BuildError as error:
        steps.say(f"QEMU: not built, using an older build or Debian's: {error}")
        # Without new `program_inputs`, so that the next set-up tries again.
        return {} if old is None else kept_fields(old, ("program", "firmware"))
    parts = install_by_digest(folder, "program", program, 0o755)
    parts |= install_by_digest(folder, "firmware", firmware, 0o644)
    return {**parts, "program_inputs": inputs}


def _package_name() -> str:
    depends = run_for_output(["apt-cache", "depends", PACKAGE])
    found = re.search(r"Depends: (linux-image-\S+)", depends)
    if found is None:
        raise BuildError(f"{PACKAGE}: apt does not know this package; `apt-get update` may help")
    return found.group(1)


def kernel_payload(image: bytes) -> bytes:
    """Return the compressed kernel inside a bzImage.

    Source: Linux, Documentation/arch/x86/boot.rst (setup_sects, payload_offset, payload_length).

    Raises:
        BuildError: The kernel is not compressed with lz4 in the legacy frame, as Debian's is.

    """
    sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    payload = image[(sectors + 1) * 512 + offset :][:length]
    if not payload.startswith(LZ4_LEGACY):
        raise BuildError(f"kernel: expected an lz4 legacy frame, got {payload[:4].hex()}")
    return payload[:-4]  # the kernel's build appends the unpacked length


def _unpack_kernel(steps: Steps) -> Path:
    packed, whole, small = (steps.scratch / name for name in ("lz4", "vmlinux", "vmlinux.small"))
    image = next((steps.scratch / "boot").glob("vmlinuz-*"))
    packed.write_bytes(kernel_payload(image.read_bytes()))
    steps.run("QEMU: unpacking the kernel", ["lz4", "-dqf", str(packed), str(whole)], timeout_s=60)
    strip = ["strip", "--strip-debug", "-o", str(small), str(whole)]
    steps.run("QEMU: stripping it", strip, timeout_s=60)
    return small
