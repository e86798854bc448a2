"""Brings the cache up to date: builds what is missing, then names the new set at once."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from penstock.envs.microvm.images.assets import (
    MANIFEST,
    VmAssets,
    digest_bytes,
    digest_file,
    load_assets,
)
from penstock.envs.microvm.recipe.image import build_agent, build_image, image_inputs
from penstock.envs.microvm.recipe.kernel import (
    SourceUnavailable,
    build_kernel,
    fetch_stock_kernel,
    kernel_inputs,
)
from penstock.envs.microvm.recipe.steps import Say, Steps, build_lock, install
from penstock.envs.sandbox import BackendUnavailable


def build_assets(folder: Path, say: Say) -> VmAssets:
    """Return the current set of VM files, building only what its inputs say is stale.

    Safe when several processes do it at once, and when one of them dies on the way.

    Args:
        folder: The cache.
        say: Shows one line of progress.

    Raises:
        BuildError: A step failed; the old set stays in place.

    """
    with build_lock(folder, say):
        for leftover in folder.glob("build-*"):
            shutil.rmtree(leftover)
        return _bring_up_to_date(folder, say)


def _bring_up_to_date(folder: Path, say: Say) -> VmAssets:
    old = _current(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        steps = Steps(Path(scratch), say)
        parts = _kernel_parts(steps, folder, old)
        parts |= _image_parts(steps, folder, old, ext4=bool(parts["stock"]))
        assets = msgspec.convert(parts, VmAssets)
        if assets == old:
            say(f"kernel {assets.kernel_version} and image are up to date")
            return assets
        return _publish(folder, assets, old)


def _current(folder: Path) -> VmAssets | None:
    try:
        return load_assets(folder)[1]
    except BackendUnavailable:
        return None


def _fields(assets: VmAssets, prefixes: tuple[str, ...]) -> dict[str, Any]:
    return {k: v for k, v in msgspec.structs.asdict(assets).items() if k.startswith(prefixes)}


def _by_digest(kind: str, path: Path) -> dict[str, Any]:
    digest = digest_file(path)
    name = f"{kind}-{digest[:16]}"
    path.replace(path.with_name(name))
    return {kind: name, f"{kind}_digest": digest}


def _kernel_parts(steps: Steps, folder: Path, old: VmAssets | None) -> dict[str, Any]:
    inputs = digest_bytes(*kernel_inputs())
    if old is not None and old.kernel_inputs == inputs:
        return _fields(old, ("kernel", "stock"))
    stock = False
    try:
        path, version = build_kernel(steps, folder)
    except SourceUnavailable as error:
        steps.say(f"kernel: no newer source: {error}")
        steps.say("kernel: Debian's own kernel stands in: each machine takes 1.3 s to boot")
        path, version = fetch_stock_kernel(steps, folder)
        inputs, stock = "", True  # the next set-up tries again
    named = _by_digest("kernel", path)
    return {**named, "kernel_version": version, "kernel_inputs": inputs, "stock": stock}


def _image_parts(steps: Steps, folder: Path, old: VmAssets | None, *, ext4: bool) -> dict[str, Any]:
    inputs = digest_bytes(*image_inputs(ext4))
    if old is not None and old.image_inputs == inputs:
        return _fields(old, ("image", "agent"))
    agent = build_agent(steps, folder)
    image = build_image(steps, folder, agent, ext4=ext4)
    return {**_by_digest("agent", agent), **_by_digest("image", image), "image_inputs": inputs}


def _publish(folder: Path, assets: VmAssets, old: VmAssets | None) -> VmAssets:
    fresh = folder / f"{MANIFEST}.new"
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(assets), indent=2))
    install(fresh, folder / MANIFEST, 0o644)
    keep = {MANIFEST, "build.lock"}
    for one in (assets, old or assets):  # runs that started before boot from the old set
        keep |= {one.kernel, one.image, one.agent}
    _sweep(folder, keep)
    return assets


def _sweep(folder: Path, keep: set[str]) -> None:
    """Remove the files of sets before the last one."""
    for path in folder.iterdir():
        if path.is_file() and path.name not in keep:
            path.unlink()
