"""Builds QEMU, static and with the devices of these machines alone, from Debian's source package.

Debian's own takes 18 ms of each start to find and link fifty libraries, this one 2 ms; and it is
all that the confined process gets to see of the host's programs.
"""

import os
from pathlib import Path

from penstock.envs.microvm.recipe.apt import apt_options
from penstock.envs.microvm.recipe.steps import BuildError, Steps, need_programs, output_of

SOURCE = Path(__file__).resolve().parents[1] / "qemu_source"
"""The list of devices and a patch."""
SUITE = "bookworm"
FIRMWARE = Path("/usr/share/qemu/bios-microvm.bin")
"""Of Debian's package, which has it as a file of its own."""
PROGRAMS = ("apt-get", "dpkg-source", "patch", "meson", "ninja", "gcc", "g++", "pkg-config")
OPTIONS = (
    *("--static", "--disable-pie", "--without-default-features", "--without-default-devices"),
    *("--target-list=x86_64-softmmu", "--with-devices-x86_64=penstock", "--enable-system"),
    *("--enable-tcg", "--enable-kvm", "--enable-seccomp", "--enable-fdt=system"),
    *("--enable-coroutine-pool", "--disable-qom-cast-debug", "--disable-user", "--disable-tools"),
)


def program_inputs() -> list[bytes]:
    """Return what decides the program's content but for the package's own version."""
    own = (Path(__file__), *sorted(SOURCE.iterdir()))
    return [*(path.read_bytes() for path in own), output_of(["gcc", "--version"]).encode()]


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
        The program, and the firmware that it needs to start.

    Raises:
        BuildError: A program or the firmware is missing, or a step failed.

    """
    need_programs(*PROGRAMS)
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
    compile_it = ["ninja", f"-j{os.cpu_count() or 1}", "qemu-system-x86_64"]
    steps.run("QEMU: compiling (3-6 minutes)", compile_it, timeout_s=1800, cwd=out)
    program, firmware = steps.scratch / "program", steps.scratch / "firmware"
    strip = ["strip", "-o", str(program), "qemu-system-x86_64"]
    steps.run("QEMU: stripping the program", strip, timeout_s=60, cwd=out)
    firmware.write_bytes(FIRMWARE.read_bytes())
    return program, firmware
