"""What machines are made of: kernels, images, programs and the agent, found by digest.

`current.json` of a folder names its newest complete set; the files it names never change. To add a
file: a field for its name and one for its digest, and its kind in `kinds`.
"""

import asyncio
import fcntl
import hashlib
import os
import shutil
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec

from penstock.envs.sandbox import BackendUnavailable
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json

MANIFEST = "current.json"
BUILD_LOCK = "build.lock"
"""Held by the process that builds a folder's set."""
BUILD_S_MAX = 1800.0
_POLL_S = 0.5
S = TypeVar("S", bound="AssetSet")


class AssetSet(msgspec.Struct, frozen=True, kw_only=True):
    """Files that belong together; paths are relative to their folder of the cache."""

    kinds: ClassVar[tuple[str, ...]]
    folder: ClassVar[str] = ""
    how_to_get: ClassVar[str]

    def files(self) -> dict[str, str]:
        """Return the names of the files that it has, by kind."""
        return {kind: name for kind in self.kinds if (name := getattr(self, kind))}


class VmAssets(AssetSet, frozen=True, kw_only=True):
    """What user-mode machines boot from, and the image and agent of all machines."""

    kinds = ("kernel", "initramfs", "loader", "library", "image", "agent", "launcher")
    how_to_get = "run `make setup` or `penstock images base`"

    kernel: str
    kernel_digest: str
    kernel_version: str
    initramfs: str = ""
    """Drivers that Debian's own kernel has as modules; where the kernel is ours, there is none."""
    initramfs_digest: str = ""
    loader: str = ""
    """What Debian's kernel is linked to: the loader of programs, and the C library."""
    loader_digest: str = ""
    library: str = ""
    library_digest: str = ""
    image: str
    image_digest: str
    agent: str
    agent_digest: str
    launcher: str = ""
    """Starts machines' processes (`confinement/launcher.c`)."""
    launcher_digest: str = ""
    launcher_inputs: str = ""
    """Digest of its source."""
    kernel_inputs: str = ""
    """Digest of the configuration, the patches and the compiler; of Debian's, of its recipe."""
    image_inputs: str = ""
    """Digest of the image's recipe and the agent's source."""

    @property
    def is_debian(self) -> bool:
        """Whether the kernel is Debian's own."""
        return bool(self.initramfs)


class QemuAssets(AssetSet, frozen=True, kw_only=True):
    """QEMU, and what it and Firecracker boot from."""

    kinds = ("kernel", "initramfs", "program", "firmware")
    folder = "qemu"
    how_to_get = "run `make vm-qemu` or `penstock images base --qemu`"

    kernel: str
    kernel_digest: str
    kernel_version: str
    initramfs: str
    initramfs_digest: str
    inputs: str
    """Digest of the package's name, the recipe and the first program's source."""
    program: str = ""
    """QEMU, static and small; empty if it could not be built: then Debian's is used."""
    program_digest: str = ""
    program_inputs: str = ""
    """Digest of its recipe and the compiler."""
    firmware: str = ""
    firmware_digest: str = ""


def vm_cache_dir() -> Path:
    """Return `$PENSTOCK_CACHE/vm`, by default `~/.cache/penstock/vm`: all checkouts share it."""
    root = os.environ.get("PENSTOCK_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "penstock") / "vm"


def load_assets(cache: Path | None = None) -> tuple[Path, VmAssets]:
    """Return the cache folder and the current set; raises as `load_set`."""
    return load_set(VmAssets, cache)


def load_qemu_assets(cache: Path | None = None) -> tuple[Path, QemuAssets]:
    """Return QEMU's folder and its current set; raises as `load_set`."""
    return load_set(QemuAssets, cache)


def load_set(kind: type[S], cache: Path | None) -> tuple[Path, S]:
    """Return the folder and the current set of one kind.

    Raises:
        BackendUnavailable: Nothing was built yet, or a file is missing.

    """
    folder = (cache or vm_cache_dir()) / kind.folder
    try:
        assets = parse_json((folder / MANIFEST).read_bytes(), kind, MANIFEST)
    except (OSError, CodecError) as error:
        words = f"{folder / MANIFEST} is missing or broken ({error})"
        raise BackendUnavailable(f"{words}: {kind.how_to_get}") from None
    for name in assets.files().values():
        if not (folder / name).is_file():
            raise BackendUnavailable(f"{folder / name} is missing: {kind.how_to_get}")
    return folder, assets


def was_there(at: float, cache: Path | None = None) -> bool:
    """Return whether the current set of user-mode machines was there at a time, in unix seconds."""
    try:
        return ((cache or vm_cache_dir()) / MANIFEST).stat().st_mtime < at
    except OSError:
        return False


def is_being_built(cache: Path | None = None) -> bool:
    """Return whether another process builds the set of user-mode machines at this moment."""
    try:
        with ((cache or vm_cache_dir()) / BUILD_LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


async def until_built(cache: Path | None = None) -> None:
    """Wait while another process builds the set.

    Raises:
        BackendUnavailable: It takes longer than `BUILD_S_MAX`.

    """
    for _ in range(int(BUILD_S_MAX / _POLL_S)):
        if not is_being_built(cache):
            return
        await asyncio.sleep(_POLL_S)
    text = f"{(cache or vm_cache_dir()) / BUILD_LOCK}: held for {BUILD_S_MAX:g} s by a build"
    raise BackendUnavailable(text)


def find_bubblewrap() -> str:
    """Return bubblewrap's path.

    Raises:
        BackendUnavailable: It is not installed.

    """
    path = shutil.which("bwrap")
    if path is None:
        raise BackendUnavailable("bubblewrap is missing: apt-get install bubblewrap")
    return path


def digest_bytes(*parts: bytes) -> str:
    """Return the hex SHA-256 of length-prefixed parts."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def digest_file(path: Path) -> str:
    """Return the hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
