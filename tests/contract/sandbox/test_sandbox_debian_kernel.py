"""Debian's own user-mode kernel, which a first run boots, under the one conformance suite."""

import pytest

from penstock.envs.microvm.images.assets import VmAssets, load_assets
from penstock.envs.microvm.recipe import kernel
from penstock.envs.microvm.recipe.steps import Steps, kept_fields, publish
from penstock.envs.microvm.uml import UmlBackend

from .check_sandbox import CHECKS, sh

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(60, func_only=True)]
"""Of a check: the download takes as long as it takes, within its own bounds."""


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    """The image, agent and launcher that are here, with the kernel as it is downloaded now."""
    folder = tmp_path_factory.mktemp("vm")
    cache, ours = load_assets()
    kinds = ("image", "agent", "launcher")
    for kind in kinds:
        (folder / getattr(ours, kind)).symlink_to(cache / getattr(ours, kind))
    scratch = tmp_path_factory.mktemp("scratch")
    fields = kernel.fetch_kernel(Steps(scratch, lambda line: None), folder)
    publish(folder, VmAssets(**fields, **kept_fields(ours, kinds)), None)
    return UmlBackend(folder)


TRY_CALLS = """
import ctypes, struct
libc = ctypes.CDLL(None)
array = struct.pack("IIII", 2, 4, 4096, 1) + bytes(100)
for name, call in {
    "bpf": (321, 0, array, len(array)), "io_uring_setup": (425, 8, bytes(120)),
    "init_module": (175, b"", 0, b""), "kexec_load": (246, 0, 0, 0, 0),
    "userfaultfd": (323, 0), "unshare": (272, 0x10000000),
    "mount": (165, b"", b"/mnt", b"hostfs", 0, 0),
}.items():
    print(name, libc.syscall(*call))
"""


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


async def test_its_programs_reach_no_more_of_the_kernel_than_ours(backend):
    for one in (backend, UmlBackend()):
        machine = await one.start()
        try:
            tried = await sh(machine, f"python3 -c '{TRY_CALLS}'")
            assert {line.split()[1] for line in tried.splitlines()} == {"-1"}, tried
            assert await sh(machine, "cat /proc/kcore /dev/mem 2> /dev/null | wc -c") == "0\n"
        finally:
            await machine.close()
