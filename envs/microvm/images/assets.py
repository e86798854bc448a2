"""What machines are made of: kernel, image and agent files in the cache, found by digest.

`current.json` of the cache folder names the newest complete set; the files it names never change.
"""

import hashlib
import os
import shutil
from pathlib import Path

import msgspec

from penstock.envs.sandbox import BackendUnavailable

HOW_TO_GET = "run `make setup` or `penstock images base`"
MANIFEST = "current.json"


class VmAssets(msgspec.Struct, frozen=True, kw_only=True):
    """One complete set; paths are relative to the cache folder."""

    kernel: str
    kernel_digest: str
    kernel_version: str
    stock: bool = False
    """Debian's own kernel stands in: it boots in a second, and has neither erofs nor overlays."""
    image: str
    image_digest: str
    agent: str
    agent_digest: str
    kernel_inputs: str = ""
    """Digest of the configuration, the patches and the compiler."""
    image_inputs: str = ""
    """Digest of the image's recipe and the agent's source."""


def vm_cache_dir() -> Path:
    """Return `$PENSTOCK_CACHE/vm`, by default `~/.cache/penstock/vm`: all checkouts share it."""
    root = os.environ.get("PENSTOCK_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "penstock") / "vm"


def load_assets(cache: Path | None = None) -> tuple[Path, VmAssets]:
    """Return the cache folder and the current set.

    Raises:
        BackendUnavailable: Nothing was built yet, or a file is missing.

    """
    folder = cache or vm_cache_dir()
    try:
        assets = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=VmAssets)
    except FileNotFoundError:
        raise BackendUnavailable(f"no VM kernel and image in {folder}: {HOW_TO_GET}") from None
    except msgspec.DecodeError as error:
        raise BackendUnavailable(f"{folder / MANIFEST} is broken ({error}): {HOW_TO_GET}") from None
    for name in (assets.kernel, assets.image, assets.agent):
        if not (folder / name).is_file():
            raise BackendUnavailable(f"{folder / name} is missing: {HOW_TO_GET}")
    return folder, assets


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
