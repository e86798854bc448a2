"""Brings the cache up to date: builds what is missing or stale, then publishes a set atomically."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from penstock.envs.microvm.images.assets import VmAssets, digest_bytes, digest_file
from penstock.envs.microvm.recipe.image import (
    LAUNCHER_SOURCE,
    build_agent,
    build_image,
    build_launcher,
    image_inputs,
)
from penstock.envs.microvm.recipe.kernel import (
    SourceUnavailable,
    build_kernel,
    debian_inputs,
    fetch_kernel,
    kernel_inputs,
)
from penstock.envs.microvm.recipe.steps import (
    BuildError,
    Say,
    Steps,
    build_lock,
    current_set,
    install_by_digest,
    kept_fields,
    publish,
)

_KERNEL_FIELDS = ("kernel", "initramfs", "loader", "library")
_BUILT_TOGETHER = {
    "kernel_inputs": _KERNEL_FIELDS,
    "image_inputs": ("image", "agent"),
    "launcher_inputs": ("launcher",),
}


def build_assets(folder: Path, say: Say, *, at_once: bool = False) -> VmAssets:
    """Return the current set of VM files, building only what is stale or damaged.

    Several processes may call it at once, and any of them may be killed in the middle.

    Args:
        folder: Folder of the cache.
        say: Function that shows one line of progress.
        at_once: Whether a run is waiting. Then Debian's kernel is used if ours was never compiled,
            and files are not read to find damage.

    Raises:
        BuildError: A step failed; the old set stays in place.

    """
    with build_lock(folder, say):
        for leftover in folder.glob("build-*"):
            # Errors are ignored: a program started by a killed builder may still be writing there,
            # and then the next build removes the folder.
            shutil.rmtree(leftover, ignore_errors=True)
        return _bring_up_to_date(folder, say, at_once)


def _bring_up_to_date(folder: Path, say: Say, at_once: bool) -> VmAssets:
    old = current_set(VmAssets, folder)
    if old is not None and not at_once:
        old = _undamaged(folder, old, say)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        steps = Steps(Path(scratch), say, is_awaited=at_once)
        parts = _kernel_parts(steps, folder, old, at_once)
        parts |= _image_parts(steps, folder, old)
        parts |= _launcher_parts(steps, folder, old)
        assets = msgspec.convert(parts, VmAssets)
        if assets == old:
            say(f"kernel {assets.kernel_version} and image are up to date")
            return assets
        publish(folder, assets, old)
        return assets


def _undamaged(folder: Path, assets: VmAssets, say: Say) -> VmAssets:
    """Return the set with the inputs of damaged files cleared, so that they are built again."""
    names = assets.files()
    for inputs, kinds in _BUILT_TOGETHER.items():
        for kind in kinds:
            digest = getattr(assets, f"{kind}_digest")
            if kind in names and digest_file(folder / names[kind]) != digest:
                say(f"{folder / names[kind]} is damaged and will be rebuilt")
                assets = msgspec.structs.replace(assets, **{inputs: ""})
    return assets


def _kernel_parts(
    steps: Steps, folder: Path, old: VmAssets | None, at_once: bool
) -> dict[str, Any]:
    inputs = digest_bytes(*kernel_inputs())
    wants_debian = at_once and (old is None or old.is_debian)
    wanted = digest_bytes(*debian_inputs()) if wants_debian else inputs
    if old is not None and old.kernel_inputs == wanted:
        return kept_fields(old, _KERNEL_FIELDS)
    if wants_debian:
        try:
            return fetch_kernel(steps, folder)
        except BuildError as error:
            steps.say(f"kernel: Debian's own is not available: {error}")
    try:
        path, version = build_kernel(steps, folder)
    except SourceUnavailable as error:
        steps.say(f"kernel: no newer source: {error}")
        steps.say("kernel: using Debian's own: machines take 1.7 times the CPU time")
        # The inputs recorded are those of Debian's kernel, so the next set-up tries again.
        return fetch_kernel(steps, folder)
    named = install_by_digest(folder, "kernel", path, 0o755)
    return {**named, "kernel_version": version, "kernel_inputs": inputs}


def _image_parts(steps: Steps, folder: Path, old: VmAssets | None) -> dict[str, Any]:
    inputs = digest_bytes(*image_inputs())
    if old is not None and old.image_inputs == inputs:
        return kept_fields(old, ("image", "agent"))
    agent = build_agent(steps, folder)
    image = build_image(steps, folder, agent)
    return {
        **install_by_digest(folder, "agent", agent, 0o755),
        **install_by_digest(folder, "image", image, 0o644),
        "image_inputs": inputs,
    }


def _launcher_parts(steps: Steps, folder: Path, old: VmAssets | None) -> dict[str, Any]:
    inputs = digest_bytes(LAUNCHER_SOURCE.read_bytes())
    if old is not None and old.launcher_inputs == inputs:
        return kept_fields(old, ("launcher",))
    built = build_launcher(steps, folder)
    return {**install_by_digest(folder, "launcher", built, 0o755), "launcher_inputs": inputs}
