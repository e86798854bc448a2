"""Converts the layers of an image from any source, each once."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from penstock.envs.microvm.images.assets import digest_bytes
from penstock.envs.microvm.oci.image import RECIPE, ContainerConfig, ImageStore
from penstock.envs.microvm.oci.layer_tar import ConvertRequest
from penstock.envs.microvm.oci.sources import ImageSource


async def fetch_layers(
    source: ImageSource, store: ImageStore, scratch: Path
) -> tuple[list[str], ContainerConfig]:
    """Return the converted layers of an image, uppermost first, and its settings."""
    config, layers = await source.config()
    found: list[str] = []
    key = digest_bytes(RECIPE.encode())
    for number, (layer, diff_id) in enumerate(zip(layers, config.rootfs.diff_ids, strict=True)):
        key = digest_bytes(key.encode(), diff_id.encode())
        digest = store.known(key)
        if not digest:
            store.say(f"image: layer {number + 1} of {len(layers)}, {layer.digest[:19]}")
            path = await source.layer(layer)
            digest = await asyncio.to_thread(_converted, store, key, path, diff_id, found, scratch)
            if path.parent == scratch:
                path.unlink(missing_ok=True)
        found.insert(0, digest)
    return found, config.config or ContainerConfig()


def _converted(  # noqa: PLR0913, PLR0917 - what to convert, and where
    store: ImageStore, key: str, blob: Path, diff_id: str, below: Sequence[str], scratch: Path
) -> str:
    def request(target: Path) -> ConvertRequest:
        return ConvertRequest(
            blobs=[str(blob)],
            diff_ids=[diff_id.removeprefix("sha256:")],
            lowers=[str(path) for path in store.paths(below)],
            target=str(target),
        )

    return store.layer(key, request, scratch)
