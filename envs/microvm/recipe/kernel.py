"""Provides the user-mode kernel: compiled from Debian's source, or Debian's own build of it.

The source comes from the backports of a newer suite through a private apt configuration. Kernels
since 6.16 have the seccomp mode.

Debian's build is available in seconds, while ours takes minutes to compile. It has every feature
and none of our patches: machines take twice the CPU time to boot and 1.7 times as much to run. It
has the file systems of machines only as modules, which an initramfs loads, and it is linked to a C
library that may be newer than the host's and is installed with it.
"""

import re
import shutil
from pathlib import Path
from typing import Any

from penstock.envs.microvm.images.assets import digest_bytes
from penstock.envs.microvm.recipe.apt import MIRROR, apt_options, update_lists
from penstock.envs.microvm.recipe.image import initramfs_inputs, pack_initramfs
from penstock.envs.microvm.recipe.steps import (
    BuildError,
    Steps,
    find_first,
    install,
    install_by_digest,
    require_programs,
    run_for_output,
)

RECIPE = Path(__file__).resolve().parents[1] / "kernel"
"""Folder with the configuration and the patches."""
SUITES = ("trixie-backports", "sid")
"""Suites that may have the kernel source, in order of preference."""
PREFERRED = "7.2"
"""Kernel series for which the patches were written and performance was measured."""
OLDEST = (6, 16)
"""Oldest usable series: the first with the seccomp mode."""
_ARCHS = (
    *("alpha", "arc", "arm", "arm64", "csky", "hexagon", "loongarch", "m68k", "microblaze"),
    *("mips", "nios2", "openrisc", "parisc", "powerpc", "riscv", "s390", "sh", "sparc", "xtensa"),
)
_DRIVERS = (
    *("accel", "clk", "crypto", "gpu", "hid", "hwmon", "iio", "infiniband", "input", "media"),
    *(
        "mfd",
        "mtd",
        "net/ethernet",
        "net/wireless",
        "pci",
        "phy",
        "pinctrl",
        "platform",
        "power",
        "scsi",
        "soc",
        "staging",
    ),
    *("thermal", "usb", "video"),
)
UNUSED = (
    *(f"*/arch/{name}/*.[chS]" for name in _ARCHS),
    *(f"*/drivers/{name}/*.[ch]" for name in _DRIVERS),
    *("*/sound/*.[ch]", "*/Documentation/*.rst", "*/Documentation/*.yaml", "*/tools/testing/*"),
    *("*/tools/perf/*", "*/samples/*.[ch]", "*.dts", "*.dtsi", "*_defconfig"),
)
"""Patterns of files to skip when unpacking: most of the tree, which is never compiled here."""


class SourceUnavailable(BuildError):
    """The kernel source of the newer suite is not available here."""


def kernel_inputs() -> list[bytes]:
    """Return the inputs of the kernel, except for the version of the source package."""
    compiler = run_for_output(["gcc", "--version"]).encode() if shutil.which("gcc") else b""
    return [*(p.read_bytes() for p in sorted(RECIPE.iterdir())), PREFERRED.encode(), compiler]


def choose_source(packages: str) -> str:
    """Return the package of the preferred kernel series, or else of the newest usable one.

    Args:
        packages: Output of `apt-cache search`.

    Raises:
        BuildError: There is no series of 6.16 or newer.

    """
    series = re.findall(r"^linux-source-(\d+)\.(\d+) ", packages, re.MULTILINE)
    usable = sorted((int(a), int(b)) for a, b in series if (int(a), int(b)) >= OLDEST)
    if not usable:
        raise BuildError(
            f"expected a linux-source of 6.16 or newer in {', '.join(SUITES)} of {MIRROR}, "
            "found none"
        )
    names = [f"{a}.{b}" for a, b in usable]
    return f"linux-source-{PREFERRED if PREFERRED in names else names[-1]}"


def _fetch(steps: Steps) -> Path:
    options = apt_options(steps.scratch, "deb", *SUITES)
    update_lists(steps, options)
    search = ["apt-cache", *options, "search", "--names-only", "^linux-source-"]
    try:
        name = choose_source(run_for_output(search))
        download = ["apt-get", *options, "-t", SUITES[0], "download", name]
        steps.run(f"kernel: downloading {name} (160 MB)", download, timeout_s=900)
    except BuildError as error:
        raise SourceUnavailable(str(error)) from error
    package = next(steps.scratch.glob("linux-source-*.deb"))
    steps.run("kernel: unpacking the package", ["dpkg-deb", "-x", str(package), "."], timeout_s=120)
    package.unlink()
    return next((steps.scratch / "usr" / "src").glob("linux-source-*.tar.xz"))


def _patch(steps: Steps, source: Path) -> None:
    for patch in sorted(RECIPE.glob("*.patch")):
        command = ["patch", "-p1", "--force", "--input", str(patch)]
        try:
            steps.run(
                f"kernel: checking {patch.name}",
                [*command, "--dry-run"],
                timeout_s=60,
                cwd=source,
            )
        except BuildError:
            # The patches only make machines faster, so the kernel works without them.
            steps.say(f"kernel: skipping {patch.name}, which does not apply: slower machines")
            continue
        steps.run(f"kernel: applying {patch.name}", command, timeout_s=60, cwd=source)


def build_kernel(steps: Steps, folder: Path) -> tuple[Path, str]:
    """Compile the kernel and install it as `kernel.new`.

    Args:
        steps: Runner with a scratch folder of its own, which needs 2.5 GB.
        folder: Folder in which to put the kernel.

    Returns:
        The path of the kernel and its version.

    Raises:
        SourceUnavailable: The source package is not available.
        BuildError: A program is missing, or a step failed.

    """
    require_programs(
        "apt-get", "dpkg-deb", "tar", "xz", "patch", "make", "gcc", "flex", "bison", "bc"
    )
    archive = _fetch(steps)
    excludes = [f"--exclude={pattern}" for pattern in UNUSED]
    unpack = ["tar", "xJf", str(archive), *excludes]
    steps.run("kernel: unpacking the source", unpack, timeout_s=300)
    archive.unlink()
    source = next(p for p in steps.scratch.glob("linux-source-*") if p.is_dir())
    _patch(steps, source)
    make = ["make", "ARCH=um", f"O={steps.scratch / 'out'}", "KBUILD_BUILD_TIMESTAMP=@0"]
    make += ["KBUILD_BUILD_USER=penstock", "KBUILD_BUILD_HOST=penstock"]
    configure = [*make, f"KCONFIG_ALLCONFIG={RECIPE / 'config'}", "allnoconfig"]
    steps.run("kernel: configuring", configure, timeout_s=120, cwd=source)
    compile_command = [*make, "-j2", "linux"]
    steps.run("kernel: compiling (2-5 minutes)", compile_command, timeout_s=1500, cwd=source)
    built = steps.scratch / "linux.stripped"
    strip = ["strip", "-o", str(built), str(steps.scratch / "out" / "linux")]
    steps.run("kernel: stripping", strip, timeout_s=60)
    version = (steps.scratch / "out" / "include" / "config" / "kernel.release").read_text().strip()
    install(built, folder / "kernel.new", 0o755)
    return folder / "kernel.new", version


SUITE = "sid"
PACKAGES = ("user-mode-linux", "libc6")
DRIVERS = ("erofs", "overlay")
LIBRARIES = {"loader": "ld-linux-x86-64.so.2", "library": "libc.so.6"}


def debian_inputs() -> list[bytes]:
    """Return the inputs of Debian's kernel files, except for the versions of the packages."""
    return [Path(__file__).read_bytes(), *initramfs_inputs()]


def fetch_kernel(steps: Steps, folder: Path) -> dict[str, Any]:
    """Install Debian's kernel and the files that it needs.

    Args:
        steps: Runner with a scratch folder of its own, which needs 300 MB.
        folder: Folder in which to put the files.

    Returns:
        The fields of `VmAssets` that belong to the kernel.

    Raises:
        BuildError: A program is missing, a package is unavailable, too old or lacks a file, or a
            step failed.

    """
    require_programs("apt-get", "dpkg-deb", "gcc", "strip")
    options = apt_options(steps.scratch, "deb", SUITE)
    update_lists(steps, options)
    download = ["apt-get", *options, "download", *PACKAGES]
    steps.run("kernel: downloading Debian's own (40 MB)", download, timeout_s=600)
    for package in PACKAGES:
        archive = find_first(steps.scratch, f"{package}_*.deb")
        unpack = ["dpkg-deb", "-x", str(archive), package]
        steps.run(f"kernel: unpacking {package}", unpack, timeout_s=120)
    unpacked = steps.scratch / PACKAGES[0]
    version = module_version(unpacked / "usr/lib/uml/modules")
    initramfs = pack_initramfs(steps, "kernel", unpacked, DRIVERS)
    kernel = find_first(unpacked / "usr/bin", "linux.uml")
    found = install_by_digest(folder, "kernel", kernel, 0o755)
    found |= install_by_digest(folder, "initramfs", initramfs, 0o644)
    for kind, name in LIBRARIES.items():
        path = find_first(steps.scratch / PACKAGES[1] / "usr/lib", f"**/{name}")
        found |= install_by_digest(folder, kind, path.resolve(), 0o755)
    inputs = digest_bytes(*debian_inputs())
    return {**found, "kernel_version": version, "kernel_inputs": inputs}


def module_version(modules: Path) -> str:
    """Return the version of a kernel, which is the name of its module folder.

    Raises:
        BuildError: The kernel is too old to have the seccomp mode.

    """
    name = next((path.name for path in modules.glob("*")), "")
    numbers = re.match(r"(\d+)\.(\d+)", name)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BuildError(
            f"user-mode-linux of {SUITE}: expected version {oldest} or newer, "
            f"found {name or 'none'}"
        )
    return name
