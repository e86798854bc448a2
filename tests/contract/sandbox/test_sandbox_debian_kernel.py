"""Debian's own user-mode kernel, which a first run boots, under the one conformance suite."""

import pytest

from penstock.envs.microvm.images.assets import VmAssets, load_assets
from penstock.envs.microvm.recipe import debian_kernel
from penstock.envs.microvm.recipe.steps import Steps, kept_fields, publish
from penstock.envs.microvm.uml import UmlBackend

from .check_sandbox import CHECKS, sh

pytestmark = [pytest.mark.vm, pytest.mark.slow]


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    """The image, agent and launcher that are here, with the kernel as it is downloaded now."""
    folder = tmp_path_factory.mktemp("vm")
    cache, ours = load_assets()
    kinds = ("image", "agent", "launcher")
    for kind in kinds:
        (folder / getattr(ours, kind)).symlink_to(cache / getattr(ours, kind))
    scratch = tmp_path_factory.mktemp("scratch")
    fields = debian_kernel.fetch_kernel(Steps(scratch, lambda line: None), folder)
    publish(folder, VmAssets(**fields, **kept_fields(ours, kinds)), None)
    return UmlBackend(folder)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_debians_kernel(backend, check):
    machine = await backend.start()
    try:
        await check(machine)
    finally:
        await machine.close()


async def test_it_is_confined_as_ours_is(backend):
    machine, ours = await backend.start(), await UmlBackend().start()
    try:
        assert await sh(machine, "uname -r") == f"{backend.assets.kernel_version}\n"
        assert machine.info.kernel_digest != ours.info.kernel_digest
        assert machine.info.confinement == ours.info.confinement
    finally:
        await machine.close()
        await ours.close()
