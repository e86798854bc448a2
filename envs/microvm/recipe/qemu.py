"""Builds what QEMU boots: Debian's cloud kernel, unpacked, and a first file system of drivers.

QEMU itself is built too (`qemu_program.py`); where that fails, Debian's does, with slower starts.
"""

import re
import struct
import tempfile
from pathlib import Path

import msgspec

from penstock.envs.microvm.images.assets import QemuAssets, digest_bytes
from penstock.envs.microvm.recipe.initramfs import initramfs_inputs, pack_initramfs
from penstock.envs.microvm.recipe.qemu_program import build_program, program_inputs
from penstock.envs.microvm.recipe.steps import (
    BuildError,
    Say,
    Steps,
    build_lock,
    current_set,
    install_by_digest,
    kept_fields,
    need_programs,
    output_of,
    publish,
)

PACKAGE = "linux-image-cloud-amd64"
DRIVERS = (
    *("virtio_ring", "virtio", "virtio_mmio", "virtio_blk", "virtio_console"),
    *("vsock", "vmw_vsock_virtio_transport_common", "vmw_vsock_virtio_transport"),
    *("libcrc32c", "erofs", "overlay"),
)
"""In the order of loading: each needs the ones before it."""
LZ4_LEGACY = b"\x02\x21\x4c\x18"


def build_qemu_assets(cache: Path, say: Say) -> QemuAssets:
    """Return the current set, building what of it the recipe, the package or the source changed.

    Raises:
        BuildError: A program is missing, or a step failed; the old set stays in place.

    """
    need_programs("apt-get", "apt-cache", "dpkg-deb", "lz4", "gcc", "strip")
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
        steps.say(f"QEMU: what is here stands in, at worst Debian's: {error}")
        return (
            {} if old is None else kept_fields(old, ("program", "firmware"))
        )  # tried again next time
    parts = install_by_digest(folder, "program", program, 0o755)
    parts |= install_by_digest(folder, "firmware", firmware, 0o644)
    return {**parts, "program_inputs": inputs}


def _package_name() -> str:
    depends = output_of(["apt-cache", "depends", PACKAGE])
    found = re.search(r"Depends: (linux-image-\S+)", depends)
    if found is None:
        raise BuildError(f"{PACKAGE}: apt knows no such package; `apt-get update` may help")
    return found.group(1)


def kernel_payload(image: bytes) -> bytes:
    """Return the compressed kernel inside a bzImage (the x86 boot protocol's header says where).

    Raises:
        BuildError: It is not lz4 in the legacy frame, as Debian's cloud kernel has been.

    """
    sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    payload = image[(sectors + 1) * 512 + offset :][:length]
    if not payload.startswith(LZ4_LEGACY):
        raise BuildError(f"the kernel is packed in an unknown way: {payload[:4].hex()}")
    return payload[:-4]  # the build appends the unpacked length


def _unpack_kernel(steps: Steps) -> Path:
    packed, whole, small = (steps.scratch / name for name in ("lz4", "vmlinux", "vmlinux.small"))
    image = next((steps.scratch / "boot").glob("vmlinuz-*"))
    packed.write_bytes(kernel_payload(image.read_bytes()))
    steps.run("QEMU: unpacking the kernel", ["lz4", "-dqf", str(packed), str(whole)], timeout_s=60)
    strip = ["strip", "--strip-debug", "-o", str(small), str(whole)]
    steps.run("QEMU: stripping it", strip, timeout_s=60)
    return small
