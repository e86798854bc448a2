"""QEMU, and what it boots from, in the cache beside the other files."""

import shutil
from pathlib import Path

import msgspec

from penstock.envs.microvm.images.assets import MANIFEST, vm_cache_dir
from penstock.envs.sandbox import BackendUnavailable

HOW_TO_GET = "run `make vm-qemu` or `penstock images base --qemu`"
FOLDER = "qemu"
PROGRAM = "qemu-system-x86_64"


class QemuAssets(msgspec.Struct, frozen=True, kw_only=True):
    """One complete set; paths are relative to the folder `qemu` of the cache."""

    kernel: str
    kernel_digest: str
    kernel_version: str
    initramfs: str
    initramfs_digest: str
    inputs: str
    """Digest of the package's name, the recipe and the first program's source."""
    program: str = ""
    """QEMU, static and small; where it could not be built, Debian's stands in."""
    program_digest: str = ""
    program_inputs: str = ""
    """Digest of its recipe and the compiler."""
    firmware: str = ""
    firmware_digest: str = ""

    def files(self) -> dict[str, str]:
        """Return the names of the files that it has, by what they are."""
        kinds = ("kernel", "initramfs", "program", "firmware")
        return {kind: name for kind in kinds if (name := getattr(self, kind))}


def load_qemu_assets(cache: Path | None = None) -> tuple[Path, QemuAssets]:
    """Return the folder and its current set.

    Raises:
        BackendUnavailable: Nothing was built yet, or a file is missing.

    """
    folder = (cache or vm_cache_dir()) / FOLDER
    try:
        assets = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=QemuAssets)
    except (OSError, msgspec.DecodeError) as error:
        words = f"no QEMU kernel in {folder} ({type(error).__name__})"
        raise BackendUnavailable(f"{words}: {HOW_TO_GET}") from None
    for name in assets.files().values():
        if not (folder / name).is_file():
            raise BackendUnavailable(f"{folder / name} is missing: {HOW_TO_GET}")
    return folder, assets


def find_qemu() -> str:
    """Return the path of Debian's QEMU.

    Raises:
        BackendUnavailable: It is not installed.

    """
    path = shutil.which(PROGRAM)
    if path is None:
        raise BackendUnavailable(f"{PROGRAM} is missing: {HOW_TO_GET}")
    return path
