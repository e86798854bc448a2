"""Layers above the base image: a task's repository, packages or services, found by digest.

```
 <cache>/images/<digest>.erofs   a layer's files, read-only, named by their content
 <cache>/images/<name>.json      what a name means now
```
A machine's root is: its own writes (tmpfs) over the layer over the base image. Layers are built by
`penstock images build` (`recipe/layer.py`).
"""

from pathlib import Path

import msgspec

from penstock.envs.microvm.assets import digest_bytes, vm_cache_dir
from penstock.envs.sandbox import BackendUnavailable

FOLDER = "images"
SUFFIX = ".erofs"


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """What a name means."""

    name: str
    digest: str
    """Hex SHA-256 of the file."""
    inputs: str
    """Digest of what it was built from: equal inputs are not built again."""
    num_bytes: int
    packages: list[str] = []
    requirements: list[str] = []
    folder: str = ""
    """Where its files came from, and `target` where they are in the machine."""
    target: str = ""


def layer_folder(cache: Path | None = None) -> Path:
    """Return the folder of all layers."""
    return (cache or vm_cache_dir()) / FOLDER


def load_layer(name: str, cache: Path | None = None) -> tuple[Path, Layer]:
    """Return a layer's file and what is known of it.

    Raises:
        BackendUnavailable: There is none of this name, or its file is gone.

    """
    folder = layer_folder(cache)
    try:
        layer = msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=Layer)
    except (OSError, msgspec.DecodeError) as error:
        known = ", ".join(layer.name for layer in list_layers(cache)) or "none"
        raise BackendUnavailable(
            f"image layer {name!r} ({type(error).__name__}); there are: {known}; "
            "`penstock images build` makes one"
        ) from None
    path = folder / f"{layer.digest}{SUFFIX}"
    if not path.is_file():
        raise BackendUnavailable(f"image layer {name!r}: {path} is missing; build it again")
    return path, layer


def list_layers(cache: Path | None = None) -> list[Layer]:
    """Return every layer that has a name, by name; broken entries are left out."""
    found: list[Layer] = []
    for path in sorted(layer_folder(cache).glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Layer))
        except msgspec.DecodeError:
            continue
    return found


def remove_unnamed(cache: Path | None = None) -> list[Path]:
    """Remove files that no name means any more; machines that run keep theirs till they end."""
    named = {layer.digest for layer in list_layers(cache)}
    files = layer_folder(cache).glob(f"*{SUFFIX}")
    unnamed = [path for path in files if path.name.removesuffix(SUFFIX) not in named]
    for path in unnamed:
        path.unlink()
    return unnamed


def layered(name: str, cache: Path | None, *, stock: bool) -> tuple[Path, Layer] | None:
    """Return the layer of a name, None for no name.

    Raises:
        BackendUnavailable: There is none, or the kernel that is here cannot mount it.

    """
    if not name:
        return None
    if stock:
        raise BackendUnavailable("Debian's own kernel mounts no layers: build one (`make setup`)")
    return load_layer(name, cache)


def image_digest(base: str, layer: tuple[Path, Layer] | None) -> str:
    """Return what a machine's record says of its image."""
    return digest_bytes(base.encode(), layer[1].digest.encode()) if layer else base
