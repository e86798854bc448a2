"""Image layers above the base image: a task's repository, packages or services, found by digest.

```
 <cache>/images/<digest>.erofs   read-only files of a layer, named by their content
 <cache>/images/<name>.json      digest that a name refers to now

 shared cache (`penstock images build`) ──copied, digest compared──▶ the host's own folder
                                                    └──▶ backend with that layer ◀──┘
```
The root of a machine stacks its own writes (tmpfs) on the layer on the base image. Layers are built
by `penstock images build` (`recipe/layer.py`). Requests carry digests: a name is resolved once,
when a task is read (`pinned`). `Images` opens backends with the layers that tasks request.
"""

import asyncio
import contextlib
import logging
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
from penstock.envs.needs import DEFAULT_NEEDS, resolve_machine_size
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

log = logging.getLogger(__name__)

FOLDER = "images"
SUFFIX = ".erofs"
IMAGE_SUFFIX = ".image"
"""Of a container image's description, whose layers are all of a machine's root (`oci/image.py`)."""
DIGEST = re.compile(r"[0-9a-f]{64}")
IMAGES_MAX = 8
"""Maximum images that a host keeps ready in addition to the default one."""


class ImageLayer(msgspec.Struct, frozen=True, kw_only=True):
    """Layer that a name refers to."""

    name: str
    digest: str
    """Hex SHA-256 of the layer's file."""
    inputs: str
    """Digest of what the layer was built from; equal inputs are not built again."""
    num_bytes: int
    packages: list[str] = []
    requirements: list[str] = []
    folder: str = ""
    """Folder from which its files were copied."""
    target: str = ""
    """Path of those files in the machine."""
    config: str = ""
    """Settings of a container image, as JSON; empty: it is a layer."""


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How programs run in machines of a container image."""

    env: dict[str, str]
    workdir: str
    uid: int
    gid: int
    entrypoint: list[str] = []
    cmd: list[str] = []


class MachineImage(msgspec.Struct, frozen=True, kw_only=True):
    """A container image: the root of machines, instead of the base image."""

    layers: list[str]
    """Digests of its layers, the uppermost first."""
    settings: ImageSettings


def layer_folder(cache: Path | None = None) -> Path:
    """Return the folder of all layers in a cache."""
    return (cache or vm_cache_dir()) / FOLDER


def layer_path(folder: Path, digest: str) -> Path:
    """Return the path of a layer's file, or of a container image's, in a folder of layers."""
    image = folder / f"{digest}{IMAGE_SUFFIX}"
    return image if image.is_file() else folder / f"{digest}{SUFFIX}"


def load_image(path: Path) -> MachineImage:
    """Return a container image.

    Raises:
        ImageAbsent: Its description is gone or damaged.

    """
    try:
        return parse_json(path.read_bytes(), MachineImage, path.name)
    except (OSError, CodecError) as error:
        raise ImageAbsent(f"image absent: {path}: {error}") from error


def _with_layers(folder: Path, digests: Collection[str]) -> set[str]:
    """Return digests, and those of the layers of the container images among them."""
    found = set(digests)
    for digest in digests:
        path = layer_path(folder, digest)
        if path.suffix == IMAGE_SUFFIX:
            found.update(load_image(path).layers)
    return found


def entry_path(folder: Path, name: str) -> Path:
    """Return the path of the entry for a name, which may contain `/` and `:`."""
    return folder / f"{quote(name, safe='')}.json"


def load_layer(name: str, cache: Path | None = None) -> tuple[Path, ImageLayer]:
    """Return the file and the entry of a layer.

    Raises:
        BackendUnavailable: There is no layer of this name, or its file is gone.

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
    """Return the digest that a reference resolves to, or the reference itself if it is unknown.

    Args:
        reference: `NAME`, `NAME@sha256:DIGEST` or `sha256:DIGEST`, as for container images.
        cache: Cache of VM files; defaults to `vm_cache_dir()`.

    """
    name, _, digest = reference.rpartition("sha256:")
    if DIGEST.fullmatch(digest) and (not name or name.endswith("@")):
        return digest
    try:
        return load_layer(reference, cache)[1].digest
    except BackendUnavailable:
        return reference


def list_layers(cache: Path | None = None) -> list[ImageLayer]:
    """Return all layers that have a name, sorted by name; damaged entries are skipped."""
    found: list[ImageLayer] = []
    for path in sorted(layer_folder(cache).glob("*.json")):
        try:
            found.append(parse_json(path.read_bytes(), ImageLayer, path.name))
        except CodecError:
            continue
    return found


def remove_unnamed(cache: Path | None = None) -> list[Path]:
    """Remove layers that no name refers to and leftovers of builds; return the removed paths.

    Running machines keep removed files open until they end. The caller must hold the build lock
    (`recipe/steps.py`): a build installs the file of a layer before its name, and while no build
    runs, folders can only be leftovers of builds that were killed.
    """
    folder = layer_folder(cache)
    named = _with_layers(folder, {layer.digest for layer in list_layers(cache)})
    files = [path for path in folder.iterdir() if path.suffix in {SUFFIX, IMAGE_SUFFIX}]
    unnamed = [path for path in files if path.stem not in named]
    for chain in folder.glob("*.chain"):
        if chain.read_text() not in named:
            unnamed.append(chain)
    for path in unnamed:
        path.unlink()
    left = [path for path in folder.glob("*/") if not path.is_symlink()]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return unnamed + left


def image_digest(base: str, layer: Path | None) -> str:
    """Return the image digest for the record of a machine: of the base, or of base and layer."""
    return digest_bytes(base.encode(), layer.stem.encode()) if layer else base


class LayeredBackend:
    """Base class of backends whose machines may have an image layer above the base image.

    Args:
        cache: Folder with kernel, image and agent; defaults to `assets.vm_cache_dir()`.
        layer: Image layer, by its name or by its file, whose name is its digest.
        needs: Size of its machines; see `resolve_machine_size`.

    Raises:
        BackendUnavailable: The assets, the layer or bubblewrap is missing.
        NeedsRefused: The needs exceed what the backend offers.

    """

    name: str
    isolation_class: IsolationClass
    processors_max: int
    memory_mib: int
    """Default memory of a machine."""

    def __init__(
        self, cache: Path | None = None, layer: str | Path = "", needs: MachineNeeds = DEFAULT_NEEDS
    ) -> None:
        self._opened_with = (cache, layer)
        self._folder, self._base = load_assets(cache)
        self.needs = resolve_machine_size(needs, self)
        self._layer: Path | None = None
        self.settings: ImageSettings | None = None
        self._files = {"image": self._folder / self._base.image}
        if layer:
            self._layer = layer if isinstance(layer, Path) else load_layer(layer, cache)[0]
            files = [self._layer]
            if self._layer.suffix == IMAGE_SUFFIX:
                image = load_image(self._layer)
                self.settings = image.settings
                files = [layer_path(self._layer.parent, digest) for digest in image.layers]
            self._files |= {f"layer{number}": path for number, path in enumerate(files)}

    def resized(self, needs: MachineNeeds) -> Self:
        """See `SizedBackend.resized`."""
        return type(self)(*self._opened_with, needs)

    def _layer_options(self, disks: str) -> list[str]:
        """Return what the guest's kernel hands to the agent about layers and their user.

        Args:
            disks: The names of disks, without the letter of each; `b` is the first layer's.

        """
        num = sum(kind.startswith("layer") for kind in self._files)
        if not num:
            return []
        names = ",".join(f"{disks}{chr(ord('b') + number)}" for number in range(num))
        if self.settings is None:
            return [f"penstock_layer={names}"]
        user = f"{self.settings.uid}:{self.settings.gid}"
        return [f"penstock_root={names}", f"penstock_user={user}"]

    def _record(self, kernel_digest: str, confinement: Confinement) -> SandboxRecord:
        """Return the record of its machines, without their boot time."""
        return SandboxRecord(
            backend=self.name,
            isolation_class=self.isolation_class,
            kernel_digest=kernel_digest,
            image_digest=image_digest(self._base.image_digest, self._layer),
            confinement=confinement.in_force,
        )

    def _check_layer(self) -> None:
        """Raise `ImageAbsent` if the layer's file is gone; `penstock images gc` may remove it."""
        for kind, path in self._files.items():
            if kind.startswith("layer") and not path.is_file():
                raise ImageAbsent(f"image absent: no {path}")


class Images:
    """Opens backends with the image layers that tasks request.

    Args:
        open_backend: Function that opens a backend with a layer's file.
        own: Folder for the host's own copies of layers; None: machines use the shared folder.
        shared: Shared folder of layers; defaults to the one in the cache.
        num_max: Maximum images that are ready at once.

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
            raise ValueError(f"Images: expected num_max >= 1, got {num_max}")
        self._open_backend = open_backend
        self._own = own
        self._shared = shared or layer_folder()
        self.num_max = num_max

    async def open(self, digest: str, ready: Collection[str]) -> SandboxBackend:
        """Return a backend whose machines have a layer.

        Args:
            digest: Digest of the layer.
            ready: Digests of images in use, whose files must stay.

        Raises:
            ImageAbsent: The shared folder does not have the layer, or its content is damaged.
            SandboxError: The layer cannot be copied, or the backend has no layers.

        """
        # The digest becomes part of a path, so nothing else may pass.
        if DIGEST.fullmatch(digest) is None:
            raise ImageAbsent(f"image absent: {digest!r} names no layer in the cache of this host")
        path = await asyncio.to_thread(self._find, digest, ready)
        return self._open_backend(path)

    def _find(self, digest: str, ready: Collection[str]) -> Path:
        """Return the path of a layer's file after comparing its content with its digest."""
        source = layer_path(self._shared, digest)
        try:
            _check(source, source, digest)
            if source.suffix == IMAGE_SUFFIX:
                for part in load_image(source).layers:
                    self._fetch(layer_path(self._shared, part), part)
            path = self._fetch(source, digest)
            if self._own is not None:
                self._trim(self._own, _with_layers(self._own, {*ready, digest}))
        except FileNotFoundError as error:
            raise ImageAbsent(f"image absent: no {source}") from error
        except OSError as error:
            raise SandboxError(f"image {digest}: {error}") from error
        return path

    def _fetch(self, source: Path, digest: str) -> Path:
        """Return the path of a file that machines use, after comparing its content."""
        if self._own is None:
            _check(source, source, digest)
            return source
        path = self._own / source.name
        if not path.is_file() or digest_file(path) != digest:
            self._copy(source, path, digest)
        return path

    def _copy(self, source: Path, path: Path, digest: str) -> None:
        """Copy a layer to the host's folder."""
        # Renamed when complete: a file under its final name is never partial.
        partial = path.with_name(f"{digest}.{uuid.uuid4().hex}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(source, partial)
            _check(partial, source, digest)
            partial.chmod(0o644)  # machines run under separate user ids
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
            log.info("image layer %s copied from %s", digest[:16], source.parent)
        finally:
            partial.unlink(missing_ok=True)

    def _trim(self, own: Path, kept: Collection[str]) -> None:
        """Remove unused layers beyond `num_max`, oldest first, and leftovers of killed copies."""
        files = sorted(own.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        whole = [path for path in files if path.suffix in {SUFFIX, IMAGE_SUFFIX}]
        leftovers = [path for path in files if path not in whole]
        whole = [path for path in whole if path.stem not in kept]
        num_room = max(0, self.num_max - len(kept))
        late = whole[: max(0, len(whole) - num_room)]
        for path in (*late, *leftovers):
            # Another process of this host may have removed it.
            with contextlib.suppress(OSError):
                path.unlink()
                log.info("image file %s removed", path.name)


def _check(path: Path, source: Path, digest: str) -> None:
    if digest_file(path) != digest:
        raise ImageAbsent(f"image absent: the content of {source} does not match its digest")


def make_images(
    backend: SandboxBackend, own: Path | None = None, num_max: int = IMAGES_MAX
) -> Images | None:
    """Return an `Images` for a backend, or None if its machines cannot have layers.

    Args:
        backend: Backend to open for each image, by its name and with default options.
        own: Folder for the host's own copies of layers; see `Images`.
        num_max: Maximum images that are ready at once.

    """
    if Capability.LAYERS not in backend.capabilities:
        return None
    name = backend.name
    return Images(lambda layer: open_backend(name, layer=layer), own=own, num_max=num_max)
