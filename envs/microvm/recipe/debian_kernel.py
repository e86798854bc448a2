"""Takes Debian's own user-mode kernel: there in seconds, where ours takes minutes to compile.

It is built for every use, without our patches: machines take twice the processor time to boot and
1.7 times as much to run. The file systems that machines need are modules there, loaded by a first
program, and it is linked to a C library that may be newer than the host's, which comes along.
"""

import re
from pathlib import Path
from typing import Any

from penstock.envs.microvm.images.assets import digest_bytes
from penstock.envs.microvm.recipe.apt import apt_options, update_lists
from penstock.envs.microvm.recipe.initramfs import initramfs_inputs, pack_initramfs
from penstock.envs.microvm.recipe.kernel import OLDEST
from penstock.envs.microvm.recipe.steps import (
    BuildError,
    Steps,
    first_of,
    install_by_digest,
    need_programs,
)

SUITE = "sid"
PACKAGES = ("user-mode-linux", "libc6")
DRIVERS = ("erofs", "overlay")
LIBRARIES = {"loader": "ld-linux-x86-64.so.2", "library": "libc.so.6"}


def debian_inputs() -> list[bytes]:
    """Return what decides its files but for the packages' own versions."""
    return [Path(__file__).read_bytes(), *initramfs_inputs()]


def fetch_kernel(steps: Steps, folder: Path) -> dict[str, Any]:
    """Install Debian's kernel and what it needs.

    Args:
        steps: In a scratch folder of its own, which needs 300 MB.
        folder: Where the files go.

    Returns:
        The fields of `VmAssets` that a kernel decides.

    Raises:
        BuildError: A program is missing, a package is not available, too old or lacks a file, or
            a step failed.

    """
    need_programs("apt-get", "dpkg-deb", "gcc", "strip")
    options = apt_options(steps.scratch, "deb", SUITE)
    update_lists(steps, options)
    download = ["apt-get", *options, "download", *PACKAGES]
    steps.run("kernel: downloading Debian's own (40 MB)", download, timeout_s=600)
    for package in PACKAGES:
        archive = first_of(steps.scratch, f"{package}_*.deb")
        unpack = ["dpkg-deb", "-x", str(archive), package]
        steps.run(f"kernel: unpacking {package}", unpack, timeout_s=120)
    unpacked = steps.scratch / PACKAGES[0]
    version = module_version(unpacked / "usr/lib/uml/modules")
    initramfs = pack_initramfs(steps, "kernel", unpacked, DRIVERS)
    kernel = first_of(unpacked / "usr/bin", "linux.uml")
    found = install_by_digest(folder, "kernel", kernel, 0o755)
    found |= install_by_digest(folder, "initramfs", initramfs, 0o644)
    for kind, name in LIBRARIES.items():
        path = first_of(steps.scratch / PACKAGES[1] / "usr/lib", f"**/{name}")
        found |= install_by_digest(folder, kind, path.resolve(), 0o755)
    inputs = digest_bytes(*debian_inputs())
    return {**found, "kernel_version": version, "kernel_inputs": inputs}


def module_version(modules: Path) -> str:
    """Return the kernel's version, the name of its folder of modules.

    Raises:
        BuildError: It is one without the seccomp mode.

    """
    name = next((path.name for path in modules.glob("*")), "")
    numbers = re.match(r"(\d+)\.(\d+)", name)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BuildError(f"user-mode-linux of {SUITE} is {name or 'empty'}: {oldest} is needed")
    return name
