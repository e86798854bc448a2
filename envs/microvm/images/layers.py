"""Layers above the base image: a task's repository, packages or services, found by digest.

```
 <cache>/images/<digest>.erofs   a layer's files, read-only, named by their content
 <cache>/images/<name>.json      what a name means now

 shared cache (`penstock images build`) ──copied, digest compared──▶ the host's own folder
                                                    └──▶ a backend of that image ◀──┘
```
A machine's root is its own writes (tmpfs) over the layer over the base image. Layers are built by
`penstock images build` (`recipe/layer.py`). Requests carry digests: a name is looked up once, when
a task is read (`pinned`). `Images` opens backends of the layers that tasks name.
"""

import asyncio
import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Self
from urllib.parse import quote

import msgspec

from penstock.envs.backends import open_backend
from penstock.envs.microvm.confinement.confinement import Confinement
from penstock.envs.microvm.images.assets import (
    digest_bytes,
    digest_file,
    load_assets,
    vm_cache_dir,
)
from penstock.envs.needs import DEFAULT_NEEDS, sized
from penstock.envs.sandbox import (
    BackendUnavailable,
    Capability,
    ImageAbsent,
    IsolationClass,
    SandboxBackend,
    SandboxError,
)
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.rollout import SandboxRecord
from penstock.messages.task import MachineNeeds

FOLDER = "images"
SUFFIX = ".erofs"
DIGEST = re.compile(r"[0-9a-f]{64}")
IMAGES_MAX = 8
"""Images that a host has ready, besides its backend's own: the most recently requested."""


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
        layer = parse_json(entry_path(folder, name).read_bytes(), ImageLayer, name)
    except (OSError, CodecError) as error:
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
    """Return the digest that a reference names here, or the reference itself if it names none.

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
            found.append(parse_json(path.read_bytes(), ImageLayer, path.name))
        except CodecError:
            continue
    return found


def remove_unnamed(cache: Path | None = None) -> list[Path]:
    """Remove layers that no name refers to; running machines keep their files until they end.

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


def image_digest(base: str, layer: Path | None) -> str:
    """Return what a machine's record says of its image."""
    return digest_bytes(base.encode(), layer.stem.encode()) if layer else base


class LayeredBackend:
    """The part of a backend that has an image layer above the base.

    Args:
        cache: Folder with kernel, image and agent; default `assets.vm_cache_dir()`.
        layer: An image layer above the base, by its name or its file, which bears its digest.
        needs: Size of its machines; see `sized`.

    Raises:
        BackendUnavailable: The assets, the layer or bubblewrap is missing.
        NeedsRefused: The host has not so many processors, or files need more than the memory.

    """

    name: str
    isolation_class: IsolationClass
    processors_max: int
    memory_mib: int
    """Of a machine that nobody asks more for."""

    def __init__(
        self, cache: Path | None = None, layer: str | Path = "", needs: MachineNeeds = DEFAULT_NEEDS
    ) -> None:
        self._opened_with = (cache, layer)
        self._folder, self._base = load_assets(cache)
        self.needs = sized(needs, self)
        self._layer: Path | None = None
        self._files = {"image": self._folder / self._base.image}
        if layer:
            self._layer = layer if isinstance(layer, Path) else load_layer(layer, cache)[0]
            self._files["layer"] = self._layer

    def resized(self, needs: MachineNeeds) -> Self:
        """See `SizedBackend.resized`."""
        return type(self)(*self._opened_with, needs)

    def _record(self, kernel_digest: str, confinement: Confinement) -> SandboxRecord:
        """Return the record of its machines, but for their boot time."""
        return SandboxRecord(
            backend=self.name,
            isolation_class=self.isolation_class,
            kernel_digest=kernel_digest,
            image_digest=image_digest(self._base.image_digest, self._layer),
            confinement=confinement.in_force,
        )

    def _check_layer(self) -> None:
        """Raise `ImageAbsent` if the layer's file is gone: `penstock images gc` may remove it."""
        if self._layer and not self._layer.is_file():
            raise ImageAbsent(f"image absent: no {self._layer}")


class Images:
    """Opens backends of images that tasks name.

    Args:
        open_backend: Takes a layer's file.
        own: The host's own folder of layers, which keeps one more than can be ready; by default
            machines use those of the shared cache, and nothing is copied.
        shared: The shared folder of layers; by default the cache's.
        num_max: Images that are ready at once.

    """

    def __init__(
        self,
        open_backend: Callable[[Path], SandboxBackend],
        *,
        own: Path | None = None,
        shared: Path | None = None,
        num_max: int = IMAGES_MAX,
    ) -> None:
        if num_max < 1:
            raise ValueError(f"images: expected num_max >= 1, got {num_max}")
        self._open_backend = open_backend
        self._own = own
        self._shared = shared or layer_folder()
        self.num_max = num_max

    async def open(self, digest: str, ready: Collection[str]) -> SandboxBackend:
        """Return a backend whose machines have a layer.

        Args:
            digest: Of the layer.
            ready: Images that are in use: their files stay.

        Raises:
            ImageAbsent: The shared cache does not have it, or its digest differs.
            SandboxError: It cannot be copied, or the backend has no layers.

        """
        if DIGEST.fullmatch(digest) is None:
            raise ImageAbsent(f"image absent: {digest!r} names no layer of this host's cache")
        path = await asyncio.to_thread(self._find, digest, ready)
        return self._open_backend(path)

    def _find(self, digest: str, ready: Collection[str]) -> Path:
        """Return the layer's file, whose content is what its name says."""
        source = layer_path(self._shared, digest)
        try:
            if self._own is None:
                _check(source, source, digest)
                return source
            path = layer_path(self._own, digest)
            if not path.is_file() or digest_file(path) != digest:
                self._copy(source, path, digest)
            self._trim(self._own, {*ready, digest})
        except FileNotFoundError as error:
            raise ImageAbsent(f"image absent: no {source}") from error
        except OSError as error:
            raise SandboxError(f"image {digest}: {error}") from error
        return path

    def _copy(self, source: Path, path: Path, digest: str) -> None:
        """Copy a layer; it gets its name once it is complete."""
        partial = path.with_name(f"{digest}.{uuid.uuid4().hex}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(source, partial)
            _check(partial, source, digest)
            partial.chmod(0o644)  # a machine's process has a user of its own
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _trim(self, own: Path, kept: Collection[str]) -> None:
        """Remove unused layers, the oldest first, and leftovers of killed copies."""
        files = sorted(own.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        unused = [path for path in files if path.name.removesuffix(SUFFIX) not in kept]
        whole = [path for path in unused if path.suffix == SUFFIX]
        num_room = max(0, self.num_max - len(kept))
        late = whole[: max(0, len(whole) - num_room)]
        for path in (*late, *(path for path in unused if path.suffix != SUFFIX)):
            with contextlib.suppress(OSError):
                path.unlink()


def _check(path: Path, source: Path, digest: str) -> None:
    if digest_file(path) != digest:
        raise ImageAbsent(f"image absent: {source} is not what its name says")


def images_of(
    backend: SandboxBackend, own: Path | None = None, num_max: int = IMAGES_MAX
) -> Images | None:
    """Return what opens a backend on other images; None where its machines have no layers.

    Args:
        backend: Opened by its name, with the default options.
        own: See `Images`; `num_max` too.
        num_max: As there.

    """
    if Capability.LAYERS not in backend.capabilities:
        return None
    name = backend.name
    return Images(lambda layer: open_backend(name, layer=layer), own=own, num_max=num_max)
