"""Packs a first file system: one program, and drivers that Debian's kernels have as modules."""

from collections.abc import Sequence
from pathlib import Path

from penstock.envs.microvm.recipe.steps import Steps, first_of

FIRST_PROGRAM = Path(__file__).resolve().parents[1] / "initramfs" / "init.c"
_DIRECTORY, _PROGRAM, _FILE = 0o40755, 0o100755, 0o100644


def initramfs_inputs() -> list[bytes]:
    """Return what decides its content but for the drivers."""
    return [Path(__file__).read_bytes(), FIRST_PROGRAM.read_bytes()]


def pack_initramfs(steps: Steps, what: str, modules: Path, drivers: Sequence[str]) -> Path:
    """Build the file system and return its file.

    Args:
        steps: In a scratch folder of its own.
        what: Whose it is, for the messages.
        modules: Folder of an unpacked package that has the drivers.
        drivers: In the order of loading: each needs the ones before it.

    Raises:
        BuildError: A driver is missing, or a step failed.

    """
    program = steps.scratch / "init"
    flags = ["-std=gnu11", "-O2", "-static", "-s", "-Wall", "-Wextra", "-Werror"]
    compile_it = ["gcc", *flags, "-o", str(program), str(FIRST_PROGRAM)]
    steps.run(f"{what}: compiling the first program", compile_it, timeout_s=120)
    entries = [("modules", _DIRECTORY, b""), ("init", _PROGRAM, program.read_bytes())]
    for number, name in enumerate(drivers):
        module = first_of(modules, f"**/{name}.ko")
        small = steps.scratch / f"{name}.small"
        strip = ["strip", "--strip-debug", "-o", str(small), str(module)]
        steps.run(f"{what}: {name}", strip, timeout_s=60)
        entries.append((f"modules/{number:02d}.ko", _FILE, small.read_bytes()))
    packed = steps.scratch / "initramfs"
    packed.write_bytes(pack_cpio(entries))
    return packed


def pack_cpio(entries: list[tuple[str, int, bytes]]) -> bytes:
    """Return a "newc" archive of (name, mode, content), as the kernel unpacks it at boot."""
    packed = bytearray()
    for number, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        path = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
        packed += b"070701" + b"".join(b"%08X" % field for field in fields) + path
        packed += bytes(-len(packed) % 4) + data
        packed += bytes(-len(packed) % 4)
    return bytes(packed)
