"""Finds the files that machines are made of: kernels, images, programs and the agent.

`current.json` of a folder names its newest complete set, whose files never change. To add a file,
add a field for its name, one for its digest, and its kind in `kinds`.
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
"""Name of the file that is locked by the process that builds a set."""
BUILD_S_MAX = 1800.0
"""Maximum seconds to wait for a build by another process."""
_POLL_S = 0.5
S = TypeVar("S", bound="AssetSet")


class AssetSet(msgspec.Struct, frozen=True, kw_only=True):
    """Files that belong together, named relative to their folder of the cache."""

    kinds: ClassVar[tuple[str, ...]]
    folder: ClassVar[str] = ""
    how_to_get: ClassVar[str]

    def files(self) -> dict[str, str]:
        """Return the names of the files in the set, by kind."""
        return {kind: name for kind in self.kinds if (name := getattr(self, kind))}


class VmAssets(AssetSet, frozen=True, kw_only=True):
    """Files that user-mode machines boot from, and the image and agent of all machines."""

    kinds = ("kernel", "initramfs", "loader", "library", "image", "agent", "launcher")
    how_to_get = "run `make setup` or `penstock images base`"

    kernel: str
    kernel_digest: str
    kernel_version: str
    initramfs: str = ""
    """Initramfs with the drivers that Debian's kernel has as modules; empty for our own kernel."""
    initramfs_digest: str = ""
    loader: str = ""
    """Dynamic loader that Debian's kernel is linked to."""
    loader_digest: str = ""
    library: str = ""
    """C library that Debian's kernel is linked to."""
    library_digest: str = ""
    image: str
    image_digest: str
    agent: str
    agent_digest: str
    launcher: str = ""
    """Program that starts the host processes of machines (`confinement/launcher.c`)."""
    launcher_digest: str = ""
    launcher_inputs: str = ""
    """Digest of the launcher's source."""
    kernel_inputs: str = ""
    """Digest of configuration, patches and compiler; for Debian's kernel, of its recipe."""
    image_inputs: str = ""
    """Digest of the image's recipe and the agent's source."""

    @property
    def is_debian(self) -> bool:
        """Whether the kernel is the one packaged by Debian."""
        return bool(self.initramfs)


class QemuAssets(AssetSet, frozen=True, kw_only=True):
    """QEMU, and the files that it and Firecracker boot from."""

    kinds = ("kernel", "initramfs", "program", "firmware")
    folder = "qemu"
    how_to_get = "run `make vm-qemu` or `penstock images base --qemu`"

    kernel: str
    kernel_digest: str
    kernel_version: str
    initramfs: str
    initramfs_digest: str
    inputs: str
    """Digest of the kernel package's name, the recipe and the source of `init`."""
    program: str = ""
    """Static QEMU built by the recipe; empty if that failed, and Debian's QEMU is used."""
    program_digest: str = ""
    program_inputs: str = ""
    """Digest of QEMU's recipe and the compiler."""
    firmware: str = ""
    firmware_digest: str = ""


def vm_cache_dir() -> Path:
    """Return `$PENSTOCK_CACHE/vm`, by default `~/.cache/penstock/vm`, which all checkouts share."""
    root = os.environ.get("PENSTOCK_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "penstock") / "vm"


def load_assets(cache: Path | None = None) -> tuple[Path, VmAssets]:
    """Return the cache folder and its current set; see `load_set` for errors."""
    return load_set(VmAssets, cache)


def load_qemu_assets(cache: Path | None = None) -> tuple[Path, QemuAssets]:
    """Return the folder of QEMU's files and its current set; see `load_set` for errors."""
    return load_set(QemuAssets, cache)


def load_set(kind: type[S], cache: Path | None) -> tuple[Path, S]:
    """Return the folder of one kind of assets and its current set.

    Raises:
        BackendUnavailable: Nothing was built yet, or a file is missing.

    """
    folder = (cache or vm_cache_dir()) / kind.folder
    try:
        assets = parse_json((folder / MANIFEST).read_bytes(), kind, MANIFEST)
    except (OSError, CodecError) as error:
        problem = f"{folder / MANIFEST} is missing or broken ({error})"
        raise BackendUnavailable(f"{problem}: {kind.how_to_get}") from None
    for name in assets.files().values():
        if not (folder / name).is_file():
            raise BackendUnavailable(f"{folder / name} is missing: {kind.how_to_get}")
    return folder, assets


def were_assets_built_before(at: float, cache: Path | None = None) -> bool:
    """Return whether the set for user-mode machines is older than a Unix time in seconds."""
    try:
        return ((cache or vm_cache_dir()) / MANIFEST).stat().st_mtime < at
    except OSError:
        return False


def is_build_running(cache: Path | None = None) -> bool:
    """Return whether another process is building the set for user-mode machines now."""
    # A shared lock: processes that only look do not block each other or delay a builder for long.
    try:
        with ((cache or vm_cache_dir()) / BUILD_LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


async def wait_for_build(cache: Path | None = None) -> None:
    """Wait while another process builds the set.

    Raises:
        BackendUnavailable: The build takes longer than `BUILD_S_MAX`.

    """
    for _ in range(int(BUILD_S_MAX / _POLL_S)):
        if not is_build_running(cache):
            return
        await asyncio.sleep(_POLL_S)
    lock = (cache or vm_cache_dir()) / BUILD_LOCK
    raise BackendUnavailable(f"{lock}: a build has held this lock for over {BUILD_S_MAX:g} s")


def find_bubblewrap() -> str:
    """Return the path of bubblewrap.

    Raises:
        BackendUnavailable: Bubblewrap is not installed.

    """
    path = shutil.which("bwrap")
    if path is None:
        raise BackendUnavailable("bubblewrap is missing: apt-get install bubblewrap")
    return path


def digest_bytes(*parts: bytes) -> str:
    """Return the hex SHA-256 of length-prefixed parts."""
    # With lengths, so that moving bytes between neighboring parts changes the digest.
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def digest_file(path: Path) -> str:
    """Return the hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
