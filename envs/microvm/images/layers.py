"""Layers above the base image: a task's repository, packages or services, found by digest.

```
 <cache>/images/<digest>.erofs   a layer's files, read-only, named by their content
 <cache>/images/<name>.json      what a name means now
```
A machine's root is: its own writes (tmpfs) over the layer over the base image. Layers are built by
`penstock images build` (`recipe/layer.py`). What travels is the digest: a name is looked up once,
where a task is read in (`pinned`).
"""

import re
import shutil
from pathlib import Path
from urllib.parse import quote

import msgspec

from penstock.envs.microvm.images.assets import digest_bytes, vm_cache_dir
from penstock.envs.sandbox import BackendUnavailable, ImageAbsent

FOLDER = "images"
SUFFIX = ".erofs"
DIGEST = re.compile(r"[0-9a-f]{64}")


class ImageLayer(msgspec.Struct, frozen=True, kw_only=True):
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


def layer_path(folder: Path, digest: str) -> Path:
    """Return where a layer's file is in a folder of layers."""
    return folder / f"{digest}{SUFFIX}"


def entry_path(folder: Path, name: str) -> Path:
    """Return where a folder of layers says what a name means; a name may have `/` and `:`."""
    return folder / f"{quote(name, safe='')}.json"


def load_layer(name: str, cache: Path | None = None) -> tuple[Path, ImageLayer]:
    """Return a layer's file and what is known of it.

    Raises:
        BackendUnavailable: There is none of this name, or its file is gone.

    """
    folder = layer_folder(cache)
    try:
        layer = msgspec.json.decode(entry_path(folder, name).read_bytes(), type=ImageLayer)
    except (OSError, msgspec.DecodeError) as error:
        known = ", ".join(layer.name for layer in list_layers(cache)) or "none"
        raise BackendUnavailable(
            f"image layer {name!r} ({type(error).__name__}); there are: {known}; "
            "`penstock images build` makes one"
        ) from None
    path = layer_path(folder, layer.digest)
    if not path.is_file():
        raise BackendUnavailable(f"image layer {name!r}: {path} is missing; build it again")
    return path, layer


def pinned(reference: str, cache: Path | None = None) -> str:
    """Return the digest that a reference means here, and as it is what means nothing here.

    Args:
        reference: `NAME`, `NAME@sha256:DIGEST` or `sha256:DIGEST`, as container images are named.
        cache: The cache of VM files.

    """
    name, _, digest = reference.rpartition("sha256:")
    if DIGEST.fullmatch(digest) and (not name or name.endswith("@")):
        return digest
    try:
        return load_layer(reference, cache)[1].digest
    except BackendUnavailable:
        return reference


def list_layers(cache: Path | None = None) -> list[ImageLayer]:
    """Return every layer that has a name, by name; broken entries are left out."""
    found: list[ImageLayer] = []
    for path in sorted(layer_folder(cache).glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=ImageLayer))
        except msgspec.DecodeError:
            continue
    return found


def remove_unnamed(cache: Path | None = None) -> list[Path]:
    """Remove what no name means any more; machines that run keep their files till they end.

    The caller holds the build lock (`recipe/steps.py`): a layer has its name a moment after its
    file, and only folders of builds that were killed are there then.
    """
    folder = layer_folder(cache)
    named = {layer.digest for layer in list_layers(cache)}
    files = folder.glob(f"*{SUFFIX}")
    unnamed = [path for path in files if path.name.removesuffix(SUFFIX) not in named]
    for path in unnamed:
        path.unlink()
    left = [path for path in folder.glob("*/") if not path.is_symlink()]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return unnamed + left


def layered(layer: str | Path, cache: Path | None, *, stock: bool) -> Path | None:
    """Return the file of a layer, None for no layer.

    Args:
        layer: Its name, or its file, which bears its digest.
        cache: The cache of VM files.
        stock: The kernel is Debian's own.

    Raises:
        BackendUnavailable: There is none, or the kernel that is here cannot mount it.

    """
    if not layer:
        return None
    if stock:
        raise BackendUnavailable("Debian's own kernel mounts no layers: build one (`make setup`)")
    return layer if isinstance(layer, Path) else load_layer(layer, cache)[0]


def check_there(layer: Path | None) -> None:
    """See that a layer's file is there still: `penstock images gc` may have removed it.

    Raises:
        ImageAbsent: It is not.

    """
    if layer is not None and not layer.is_file():
        raise ImageAbsent(f"image absent: no {layer}")


def image_digest(base: str, layer: Path | None) -> str:
    """Return what a machine's record says of its image."""
    return digest_bytes(base.encode(), layer.stem.encode()) if layer else base
