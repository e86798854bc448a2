"""A host's images: layers found by digest in the shared cache, or copied from there to its own.

```
 shared cache (`penstock images build`) ──copied, compared with its digest──▶ the host's own folder
                                                          └──▶ a backend of that image ◀──┘
```
"""

import asyncio
import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

from penstock.envs.backends import open_backend
from penstock.envs.microvm.images.assets import digest_file
from penstock.envs.microvm.images.layers import DIGEST, SUFFIX, layer_folder, layer_path
from penstock.envs.sandbox import Capability, ImageAbsent, SandboxBackend, SandboxError

IMAGES_MAX = 8
"""Images that a host has ready, besides the one of its backend: those asked for last."""


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
            ImageAbsent: The shared cache has it not, or it is not what its name says.
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
        """Copy a layer, which has its name once it is whole."""
        partial = path.with_name(f"{digest}.{uuid.uuid4().hex}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(source, partial)
            _check(partial, source, digest)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _trim(self, own: Path, kept: Collection[str]) -> None:
        """Remove what is not in use, the oldest first, and what a copy that was killed left."""
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

    def open_image(layer: Path) -> SandboxBackend:
        return open_backend(backend.name, layer=layer)

    return Images(open_image, own=own, num_max=num_max)
