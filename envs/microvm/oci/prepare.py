"""Turns an image reference or a Dockerfile folder into an image that machines can boot.

Readers of tasks call `prepare_image`, which returns the settings and the digest for `Task.image`.
A machine of that image has the image's own root; its `/work` is the image's working directory.
"""

import asyncio
from pathlib import Path

import msgspec

from penstock.envs.microvm.images.layers import (
    ImageLayer,
    ImageSettings,
    load_image,
    load_layer,
)
from penstock.envs.microvm.oci.build import BuildOptions, build_dockerfile
from penstock.envs.microvm.oci.image import ImageStore
from penstock.envs.microvm.oci.pull import fetch_layers
from penstock.envs.microvm.oci.registry import RegistrySource
from penstock.envs.microvm.oci.sources import ImageSource, open_files
from penstock.envs.microvm.oci.tree import ImageError
from penstock.envs.microvm.recipe.steps import Say
from penstock.envs.sandbox import BackendUnavailable

PULL_S_MAX = 3_600.0


class PreparedImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image that machines boot."""

    digest: str
    """For `Task.image`."""
    name: str
    settings: ImageSettings


async def prepare_image(
    source: str | Path, *, name: str = "", options: BuildOptions | None = None, say: Say
) -> PreparedImage:
    """Return an image that machines can boot; pull or build it unless it exists already.

    Args:
        source: Reference such as `python:3.12` as a str; or the Path of an archive, an image
        folder, or a folder with a `Dockerfile`.
        name: Its name in the store; by default the reference, or the name of the file or folder.
        options: How to build, and whether the network may be used.
        say: Function that shows one line of progress.

    Raises:
        ImageError: The image or the Dockerfile is damaged or hostile, exceeds a bound, or requires
        what no machine has; the error names the line, the file or the field.
        RegistryError: A registry cannot be reached or refuses.
        BackendUnavailable: Machines, which builds need, cannot be started here.

    """
    options = options or BuildOptions()
    if isinstance(source, Path) and _has_file(source / options.dockerfile):
        entry = await build_dockerfile(source, name or default_name(source), options, say)
    elif not name and (known := known_image(str(source), options.cache)):
        return known
    else:
        entry = await pull_image(source, name=name, options=options, say=say)
    return _prepared(entry, options.cache)


def _has_file(path: Path) -> bool:
    return path.exists()


def known_image(name: str, cache: Path | None = None) -> PreparedImage | None:
    """Return the image of a name, if it is in the store."""
    try:
        path, entry = load_layer(name, cache)
    except BackendUnavailable:
        return None
    return _prepared(entry, cache) if path.suffix == ".image" else None


def _prepared(entry: ImageLayer, cache: Path | None) -> PreparedImage:
    path, _ = load_layer(entry.name, cache)
    settings = load_image(path).settings
    return PreparedImage(digest=entry.digest, name=entry.name, settings=settings)


def default_name(path: Path) -> str:
    """Return the name of an image that comes from a path."""
    name = path.resolve().name.lower().removesuffix(".tar.gz").removesuffix(".tar")
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)[:80]


async def pull_image(
    given: str | Path, *, name: str = "", options: BuildOptions, say: Say
) -> ImageLayer:
    """Fetch an image from a registry, an archive or a folder; see `prepare_image`."""
    reference = str(given)
    store = ImageStore(say, options.cache)
    async with asyncio.timeout(PULL_S_MAX) as deadline:
        try:
            with store.locked() as scratch:
                source: ImageSource
                if isinstance(given, Path):
                    source = await asyncio.to_thread(open_files, given, scratch)
                elif options.offline:
                    raise ImageError(f"image {reference!r}: not in the store, and offline")
                else:
                    source = RegistrySource(reference, scratch, options.credentials, say)
                name = name or (default_name(given) if isinstance(given, Path) else reference)
                layers, config = await fetch_layers(source, store, scratch)
                return store.publish(name, layers, config, scratch, reference)
        except TimeoutError:
            if deadline.expired():
                raise ImageError(f"{reference}: takes more than {PULL_S_MAX:g} s") from None
            raise
